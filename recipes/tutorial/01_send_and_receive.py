"""01 · Send and receive

Two processes each have a part of the batch. How does one of them obtain the other's gradient?

              rank 0                                   rank 1
              gradient of samples 0 … 5                gradient of samples 6 … 11
    send ▶────────────────────────────────────────────▶ receive
                                                        add: the sum of both
    receive ◀─────────────────────────────────────────◀ send
              the sum of both                           the sum of both
"""

import torch
from problem import NUM_SAMPLES, answer, gradient_of_sum, seconds_of, share

import ddp

# ## A message has two ends
#
# `ddp.launch` starts a function in two processes, the *workers*, and `ddp.init` lets them find each other. From then on
# each has a number, its *rank*, and is itself called rank 0 or rank 1. They share nothing: `mine` is a different tensor
# in each, in separate memory. The only way from one to the other is a message, and a message takes two calls: one rank
# sends, and the other one receives, into a tensor of the same type and size. Each waits for the other. Messages from
# one rank to another are received in the order in which they were sent.


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
# sending, too. Both wait forever. That is a *deadlock*, and neither line is wrong by itself. (Elsewhere small messages
# may be kept in a buffer, and then the mistake shows only when tensors are large.)


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


def on_each_rank() -> tuple[list[torch.Tensor], float, float, str]:
    """Returns the gradient by both ways, the seconds of an exchange and of an addition, and what a deadlock says."""
    comm = ddp.init(abort_s=2)  # the deadline of every wait, in seconds; 600 unless set
    mine = gradient_of_sum(*share(comm.rank, comm.world_size))
    gradients = [way(comm, mine) / NUM_SAMPLES for way in (there_and_back, both_at_once)]
    one, many = torch.ones(1), torch.ones(100_000)
    exchange_s = seconds_of(comm, lambda: both_at_once(comm, one))
    addition_s = seconds_of(comm, lambda: many.add_(1)) / len(many)
    try:
        both_send_first(comm, mine)
    except ddp.PeerLost as error:
        return gradients, exchange_s, addition_s, str(error)
    return gradients, exchange_s, addition_s, "no deadlock"


if __name__ == "__main__":
    results = ddp.launch(on_each_rank, workers=2)
    _, exchange_s, addition_s, _ = results[0]
    print(f"one number each way: {1e6 * exchange_s:.0f} µs, and a core adds {exchange_s / addition_s:,.0f} meanwhile")
    print("both send first, and after 2 s:")
    for rank, (gradients, *_, said) in enumerate(results):
        print(f"  rank {rank}: {said}")
        assert all(torch.equal(gradient, results[0][0][0]) for gradient in gradients)  # both ways, and both ranks
        assert torch.allclose(gradients[0], answer()) and exchange_s > addition_s
        assert f"lost rank {1 - rank} " in said and f"to rank {1 - rank} [send of [67]]" in said
        assert "ranks 0 and 1 both wait for the other one to receive: let one of them receive first" in said

# ## What to look at
#
# The deadlock ends, because every wait in this library has a deadline. The error says which two ranks wait for each
# other, and what to do. (It is a `PeerLost`, because a rank that does not answer in time is treated as lost. So a
# deadline must be longer than the longest pause of a rank that is only slow.) Without a deadline, a program like
# `both_send_first` hangs until somebody kills it.
#
# ## The number that surprised
#
# The first line: while one number travels, a core adds hundreds of thousands, or millions. So as long as messages are
# small, what counts is how *often* ranks communicate. Chapter 04 measures it.
#
# ## Exercises
#
# 1. Let rank 0 send first and receive then, and rank 1 receive first and send then. Why is there no deadlock? How long
#    does it take beside `both_at_once`, for one number, and for two million?
# 2. Take away the last two assertions. In the `try`, let rank 0 send `mine`, and rank 1 receive it into
#    `torch.empty(67)`, which has another type, or into 60 elements of the right type. What does each rank say, and how
#    does it know?
#
# ## Next
#
# `02_ring.py`: more than two ranks, all busy all the time.
