"""What commands need of an engine beside the server: checks of the machine, and how far kernels are compiled."""
