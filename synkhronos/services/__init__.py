"""Memory and processes for ranks at their own pace, without commands and barriers, on one machine.

``registers`` are bytes that one process writes and others read: questions and answers, exchanges of a
group, and reports. ``stripes`` are memory that changes piece by piece, here or on another machine, and
``messages`` go from one rank to the mailbox of another. A ``controller`` is a process that answers
questions. ``background_processes`` are processes of the script that belong to no world.
"""
