"""The communicator: runs collectives (schedules as data) over a transport or in shared memory, each with a deadline.

    a schedule over a transport     wire_format.py, arithmetic.py, execute.py, way.py, settings.py, call.py, status.py,
                                    watchdog.py, wire.py
    in the memory of one host       host_memory.py, host_reduce.py
    both together                   across.py, carrier.py, links.py
    the fastest way                 calibrate.py, select.py
    one call at a time              work.py, turn.py
    from one rank to one other      messages.py
    the user's verbs                checks.py, flat.py, communicator.py, objects.py
    how a session begins and ends   rendezvous.py, setup.py
"""
