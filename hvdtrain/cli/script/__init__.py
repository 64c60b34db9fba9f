"""Reading a user's Horovod script: what it calls, and what has to change."""
