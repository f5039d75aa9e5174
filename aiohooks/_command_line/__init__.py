"""The commands of `aiohooks`, whose arguments and help are in `aiohooks.__main__`.

    checkpoints     list and verify the checkpoints in a directory
    run             start a function as a chief and its workers
    why             show why a process waits

`aiohooks.__main__` imports the module of a command when the command is called.
"""
