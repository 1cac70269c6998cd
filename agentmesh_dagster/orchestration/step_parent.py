"""Makes the process that step processes are forked from outlive a signal to all of a run's processes.

That process imports this module among the libraries that it loads, and nobody else does. A service manager ends a
service with SIGTERM to each of its processes; without their parent Dagster would take steps for dead that are still
cleaning up. The parent ends when the run's process has.
"""

import os
import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
