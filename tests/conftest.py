"""What every test may take for granted."""

import signal

# A run that a shell started in the background ignores interrupts, and so would every child that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
