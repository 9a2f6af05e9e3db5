"""The rendezvous of a launch on one host: there is one agent, and its store listens on loopback only.

torchrun's own c10d rendezvous keeps its state as a pickle in a store that listens on every interface. A stranger who
reaches that port can overwrite the state, and the launcher would execute it. Here there is no state to overwrite.
"""

from __future__ import annotations

import socket
import sys

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic import rendezvous

ADDRESS, INTERFACE = "127.0.0.1", "lo0" if sys.platform == "darwin" else "lo"
ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}
"""An environment in which Gloo and NCCL listen only where processes of this host reach them."""
BACKEND = "ddp-one-host"


class OneHost(rendezvous.RendezvousHandler):
    """Answers torchrun's engine at once: there is one agent, and a store for its workers."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        """Starts a store on a free port, for torch.distributed where the workers' program begins it itself.

        The engine does not use that one, and neither does `ddp.init`, because every user of this host reaches it.
        """
        listening = socket.create_server((ADDRESS, 0))  # because TCPStore itself listens on all addresses
        port = listening.getsockname()[1]
        self._served = TCPStore(
            ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        return rendezvous.RendezvousInfo(HashStore(), 0, 1, rendezvous.RendezvousStoreInfo(ADDRESS, port))

    @property
    def use_agent_store(self) -> bool:
        """Lets rank 0 connect to the store that is there, instead of starting another one."""
        return True

    def get_backend(self) -> str:
        """Returns the name under which the engine finds this class."""
        return BACKEND

    def get_run_id(self) -> str:
        """Returns the name that the engine gave the launch."""
        return self._run_id

    def is_closed(self) -> bool:
        """Returns False: no other agent can end this launch."""
        return False

    def set_closed(self) -> None:
        """Does nothing: there is no other agent to be told."""

    def num_nodes_waiting(self) -> int:
        """Returns 0: no host joins later."""
        return 0

    def shutdown(self) -> bool:
        """Does nothing: the store ends with its last reference."""
        return True


def _create(parameters: rendezvous.RendezvousParameters) -> rendezvous.RendezvousHandler:
    return OneHost(parameters.run_id)


rendezvous.rendezvous_handler_registry.register(BACKEND, _create)
