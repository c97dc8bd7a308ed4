"""Kernels stay LLVM code until an entry that calls them is compiled: then all of it is optimised and assembled once.

Numba makes each function a library of its own: with all that it calls it is optimised and turned into machine code. A
kernel that lies seven calls below an entry would go through that seven times, and its own machine code is never run.
Here a kernel's library holds its own code alone and knows those of the kernels it calls; an entry, which numba compiles
as ever, gets them all at once. Used by `compiled.py` alone.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any, Final

from llvmlite import binding as llvm
from numba import _dynfunc  # type: ignore[attr-defined]
from numba.core import codegen, compiler, typed_passes, untyped_passes
from numba.core.compiler_machinery import PassManager, register_pass

_MANGLED: Final = "_Z"  # how numba's names of compiled functions begin


class KernelLibrary(codegen.JITCodeLibrary):
    """The code of one kernel, and the libraries that it calls."""

    def add_linking_library(self, library: Any) -> None:
        """Note that this kernel calls into `library`."""
        self._linking_libraries.append(library)

    def _optimize_functions(self, module: Any) -> None:
        """As numba's, for functions that have a body: making a pass manager for each declaration takes its time."""
        module.data_layout = self._codegen._data_layout
        for function in module.functions:
            if not function.is_declaration:
                manager, builder = self._codegen._function_pass_manager()
                manager.run(function, builder)

    def finalize(self) -> None:
        """Make the code ready to be linked beside others of the same name, whether it is called there yet or not.

        What is only "linkonce" is left out where no call to it is there yet, and a kernel that comes later may have
        one: the caller so far may have lost its own, of a branch that is never taken on this CPU.
        """
        self._raise_if_finalized()
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage == llvm.Linkage.external:
                function.linkage = "weak_odr"
        self._final_module.verify()
        self._finalized = True

    def _get_module_for_linking(self) -> Any:
        """This kernel's code with that of all it calls; whoever links it gets what is called of it.

        Raises RuntimeError where a call leads nowhere: LLVM would have it call address 0.
        """
        self._ensure_finalized()
        if self._shared_module is None:
            module = self._final_module.clone()
            seen, waiting, others = {self}, list(self._linking_libraries), []
            while waiting:
                library = waiting.pop()
                if library in seen:
                    continue
                seen.add(library)
                library._ensure_finalized()
                self._reload_init.update(library._reload_init)
                if isinstance(library, KernelLibrary):
                    module.link_in(library._final_module, preserve=True)
                    waiting += library._linking_libraries
                else:
                    others.append(library)
            for library in others:  # numba's own, "linkonce" and whole each: when all calls to them are there
                module.link_in(library._get_module_for_linking(), preserve=True)
            for function in module.functions:
                if function.linkage == llvm.Linkage.weak_odr:
                    function.linkage = "linkonce_odr"
                if function.is_declaration and function.name.startswith(_MANGLED):
                    raise RuntimeError(f"kernel {self.name}: nothing defines {function.name}")
            self._shared_module = module
        return self._shared_module


# Passes for closures and for expressions of whole arrays: kernels have neither, and looking for them takes a tenth of
# all the time.
_NEEDLESS: Final = (untyped_passes.InlineClosureLikes, typed_passes.NopythonRewrites)


@register_pass(mutates_CFG=True, analysis_only=False)
class _KernelLowering(typed_passes.NativeLowering):
    """As numba's, without machine code."""

    _name = "kernel_lowering"

    def run_pass(self, state: Any) -> bool:
        target = state.targetctx
        state.library = library = KernelLibrary(target.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        lowered = state["cr"]
        # Numba's key of the function: an object that Python could not call either if the kernel had machine code.
        name, module = lowered.fndesc.qualname.split(".")[-1], lowered.fndesc.lookup_module()
        key = _dynfunc.make_function(module, name, f"kernel {name}", 0, lowered.env, (library,))
        target.insert_user_function(key, lowered.fndesc, [library])
        state.reload_init.extend(library._reload_init)
        state["cr"] = lowered._replace(cfunc=key)
        return True


class KernelCompiler(compiler.CompilerBase):
    """Numba's pipeline up to the LLVM code of the function."""

    def define_pipelines(self) -> list[Any]:
        """The usual passes but _NEEDLESS, with a lowering that leaves machine code to the entries."""
        manager = PassManager("kernel")
        for each, description in compiler.DefaultPassBuilder.define_nopython_pipeline(self.state).passes:
            if each not in _NEEDLESS:
                manager.add_pass(_KernelLowering if each is typed_passes.NativeLowering else each, description)
        manager.finalize()
        return [manager]
