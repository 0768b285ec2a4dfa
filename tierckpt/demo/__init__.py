"""The main job, small: trains a GPT, loses a process in the middle of a save, shows that nothing was lost.

``report`` runs it all and compares; ``train`` is one training process; ``gpt`` and ``text`` are the model and
its data; ``digest`` says what a state is, whatever the number of processes that hold it.
"""
