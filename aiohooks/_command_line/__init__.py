"""The commands of `aiohooks`, whose arguments and help are in `aiohooks.__main__`.

    run             start a function as a chief and its workers
    steps           show a run in a step store
    why             show why processes wait, and for which others

`checkpoints` is in `aiohooks.checkpoint`, whose files it shows. The module of a command is imported
when the command is called.
"""
