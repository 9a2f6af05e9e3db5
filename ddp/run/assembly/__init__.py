"""From settings to components: model, data, sampler, optimizer; and the stages of a run in one worker."""
