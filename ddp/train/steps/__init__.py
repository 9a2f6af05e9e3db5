"""A task, a step of it, where steps come from, the state that they change, and the callbacks that watch it."""
