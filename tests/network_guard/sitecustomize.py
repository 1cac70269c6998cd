"""Python imports this module by itself at its start, where the folder is on PYTHONPATH."""

import network_guard

network_guard.install()
