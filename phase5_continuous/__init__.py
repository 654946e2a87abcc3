"""Phase 5, deciding: the scheduler, its policies, preemption, the step loop, the simulator. Not yet built."""
