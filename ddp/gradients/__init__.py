"""Gradients: the buckets that they live in, what a step must agree on, and hooks that send less than all of them."""

from ddp.gradients.hooks.hook import DenseStart as DenseStart
from ddp.gradients.hooks.hook import ErrorFeedback as ErrorFeedback
from ddp.gradients.hooks.hook import Hook as Hook
from ddp.gradients.hooks.powersgd import PowerSGD as PowerSGD
from ddp.gradients.hooks.sign import Sign as Sign
from ddp.gradients.hooks.sparsification import RandomK as RandomK
from ddp.gradients.hooks.sparsification import TopK as TopK
