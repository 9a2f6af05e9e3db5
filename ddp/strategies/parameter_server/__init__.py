"""Parameter servers: workers lease samples, pull parameters and push gradients; servers update, and hold all state."""
