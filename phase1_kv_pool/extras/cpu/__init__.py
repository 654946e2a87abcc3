"""The store on a CPU."""
