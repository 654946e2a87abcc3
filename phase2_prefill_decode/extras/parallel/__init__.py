"""Tensor parallel: one model over several devices of a machine, a process each.

split    the configuration of a rank's part
shard    what a rank holds: its heads, its part of the MLP, its rows of the vocabulary
group    the collectives: tensors summed, collected and sent among the ranks
layers   the decoder of a rank: three kinds of its layers end or begin with a collective
ranks    the other processes, seen from rank 0: it calls their methods, and says how one has failed
leader   rank 0's runner, which has the others run each step with it
worker   the process of another rank: it loads its part and runs the same steps
load     loads a model over several ranks
"""
