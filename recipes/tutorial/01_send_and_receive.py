"""01 · Send and receive

Two processes have a part of the batch each. How does one get at the gradient of the other?

              rank 0                                   rank 1
              gradient of samples 0 … 5                gradient of samples 6 … 11
    send ▶────────────────────────────────────────────▶ receive
                                                        add: the sum of both
    receive ◀─────────────────────────────────────────◀ send
              the sum of both                           the sum of both
"""

import time

import torch
from problem import NUM_SAMPLES, answer, gradient_of_sum, share

import ddp

# ## A message has two ends
#
# `ddp.launch` starts a function in two processes, and `ddp.init` lets them find each other. They share nothing: `mine`
# is another tensor, in another memory, in each. The only way from one to the other is a message, and it takes two: one
# rank sends, the other one receives, into a tensor of the same shape and type. Each waits for the other.


def there_and_back(comm: ddp.Communicator, mine: torch.Tensor) -> torch.Tensor:
    """Adds up two ranks' tensors: rank 1 adds, and sends the sum back."""
    if comm.rank == 0:
        comm.send(mine, dst=1)
        return comm.recv(torch.empty_like(mine), src=1)
    total = comm.recv(torch.empty_like(mine), src=0) + mine
    comm.send(total, dst=0)
    return total


# ## Both at once
#
# Rank 1 was idle before the message came, and rank 0 while rank 1 added. If both send first and then receive, the two
# messages cross, and both ranks add. But a send ends only when the other rank has received, and it cannot: it is
# sending, too. Both wait for ever. That is a *deadlock*, and nothing in either line is wrong by itself.


def both_send_first(comm: ddp.Communicator, mine: torch.Tensor) -> torch.Tensor:
    """Deadlocks."""
    peer = 1 - comm.rank
    comm.send(mine, dst=peer)
    return comm.recv(torch.empty_like(mine), src=peer) + mine


# The way out is to *post* the send without waiting for its end, to receive, and to wait afterwards.


def both_at_once(comm: ddp.Communicator, mine: torch.Tensor) -> torch.Tensor:
    """Adds up two ranks' tensors: both send, both receive, both add."""
    peer = 1 - comm.rank
    sending = comm.send(mine, dst=peer, async_op=True)
    theirs = comm.recv(torch.empty_like(mine), src=peer)
    sending.wait()  # until then `mine` belongs to the message, and must not be changed
    return theirs + mine


def on_each_rank() -> tuple[list[torch.Tensor], float, str]:
    """Returns the gradient by both ways, the seconds of an exchange, and what a deadlock says."""
    comm = ddp.init(abort_s=2)  # no wait takes longer than two seconds
    mine = gradient_of_sum(*share(comm.rank, comm.world_size))
    gradients = [way(comm, mine) / NUM_SAMPLES for way in (there_and_back, both_at_once)]
    one, start = torch.ones(1), time.perf_counter()
    for _ in range(200):
        both_at_once(comm, one)
    exchange_s = (time.perf_counter() - start) / 200
    try:
        both_send_first(comm, mine)
    except ddp.PeerLost as error:
        return gradients, exchange_s, str(error)
    return gradients, exchange_s, "no deadlock"


if __name__ == "__main__":
    results = ddp.launch(on_each_rank, workers=2)
    for rank, (gradients, exchange_s, said) in enumerate(results):
        print(f"rank {rank}: {1e6 * exchange_s:.0f} µs for one number each way. Then both send first, and after 2 s:")
        print(f"  {said}\n")
        assert all(torch.allclose(gradient, answer()) for gradient in gradients)
        assert torch.equal(gradients[0], results[0][0][0])  # both ranks have the same bits
        assert f"lost rank {1 - rank}" in said and "ranks 0 and 1 both wait for the other one to receive" in said

# ## What to look at
#
# The deadlock ends, because every wait in this library has a deadline. The error says which two ranks wait for each
# other, and what to do. Without a deadline, a program like `both_send_first` hangs until somebody kills it.
#
# ## The number that surprised
#
# The time for one number each way. A core adds some hundred thousand numbers meanwhile. So what counts is how *often*
# ranks talk, until messages are large; chapter 04 measures both.
#
# ## Exercises
#
# 1. Let rank 0 send first and receive then, and rank 1 receive first and send then. Why is there no deadlock, and how
#    long does it take beside `both_at_once`?
# 2. Let rank 1 receive into `torch.empty(60)`. What does each rank say, and how does it know?
#
# ## Next
#
# `02_ring.py`: more than two ranks, all busy all the time.
