"""Gradients: the buckets that they live in, what a step must agree on, and hooks that send less than all of them."""

from ddp.gradients.hooks.error_feedback import DenseStart as DenseStart
from ddp.gradients.hooks.error_feedback import ErrorFeedback as ErrorFeedback
from ddp.gradients.hooks.hook import Hook as Hook
from ddp.gradients.hooks.powersgd import PowerSGD as PowerSGD
from ddp.gradients.hooks.random_k import RandomK as RandomK
from ddp.gradients.hooks.sign import Sign as Sign
from ddp.gradients.hooks.top_k import TopK as TopK
