"""The native pass: C++ kernels for few rows, built on this machine, called once a pass.

``build`` compiles ``csrc`` (standard library only: the package's build hook runs it too), ``library`` loads the result and
mirrors its C structures, ``packing`` lays weights out in the order in which the kernels read them. The target that uses
them is :class:`outrider.models.native.NativeTarget`.
"""
