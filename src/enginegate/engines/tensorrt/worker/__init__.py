"""A stand-alone program that builds, inspects and runs plans in whichever Python has TensorRT.

``PYTHON worker JOB.json``: this folder, the standard library and one TensorRT library are all that
it needs, so it imports nothing of Enginegate. It runs alone because a library may crash, hang or
fill the memory, and because TensorRT 8.6 has no bindings for the Pythons that Enginegate runs in.
"""
