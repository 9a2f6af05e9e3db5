"""Gradients: the buckets that they live in, what a step must agree on, and hooks that send less than all of them."""

from ddp.gradients.dense_start import DenseStart as DenseStart
from ddp.gradients.error_feedback import ErrorFeedback as ErrorFeedback
from ddp.gradients.hook import Hook as Hook
from ddp.gradients.powersgd import PowerSGD as PowerSGD
from ddp.gradients.random_k import RandomK as RandomK
from ddp.gradients.sign import Sign as Sign
from ddp.gradients.top_k import TopK as TopK
