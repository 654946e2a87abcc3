"""Scripts that time other engines, each in an environment of its own: run.sh says how."""
