"""Parameter servers: workers lease samples, pull parameters and push gradients; servers hold and update all state."""
