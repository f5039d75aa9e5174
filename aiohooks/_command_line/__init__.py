"""The commands of `aiohooks`, whose arguments and help are in `aiohooks.__main__`.

    run             start a function as a chief and its workers
    why             show why a process waits

The command `checkpoints` is in `aiohooks.checkpoint`, whose files it shows. `aiohooks.__main__`
imports the module of a command when the command is called.
"""
