"""Tensor parallel: one model over several devices of a machine, a process each.

split    the configuration of a rank's part
shard    what a rank holds: its heads, its part of the MLP, its rows of the vocabulary
group    the collectives: tensors summed, collected and sent among the ranks
layers   the decoder of a rank: three kinds of its layers end or begin with a collective
ranks    the other processes, seen from rank 0: commands as integers, replies, and how one has failed
load     loads a model over several ranks
leader   rank 0's decoder, which has the others compute each step with it
worker   the main function of another rank: it loads its part, then follows commands
"""
