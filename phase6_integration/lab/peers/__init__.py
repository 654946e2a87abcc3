"""Other engines beside this one: each runs in a process of its own, in an environment that setup.sh makes."""
