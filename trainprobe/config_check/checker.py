"""ConfigChecker: the one object a training script needs to leave a pack of what decides its numbers."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from trainprobe.config_check.overwrite import refuse_foreign
from trainprobe.config_check.settings import CapturedSettings, make_settings
from trainprobe.errors import UsageError

if TYPE_CHECKING:
    from trainprobe.config_check.capture.recorder import SettingsRecorder


class ConfigChecker:
    """Captures environment, packages, hyperparameters, data, weights and randomness of a run into one zip.

    Call `ConfigChecker.apply_patches()` before anything else, so that what happens before the model exists is seen, and make a
    ConfigChecker once there is a model. It captures `micro_steps` micro-steps, takes all its patches away and writes the pack.
    """

    _recorder: ClassVar[SettingsRecorder | None] = None

    @classmethod
    def apply_patches(cls, framework: str = "pytorch", *, fmk: str | None = None, **settings: Any) -> None:
        """Begin to watch random calls, argument parsers, optimizers and framework settings.

        framework (or fmk): pytorch or mindspore. Further settings: see `settings.Settings`. Calling it again starts anew.
        """
        chosen = _with_environment(make_settings({"framework": fmk or framework, **settings}))
        cls.stop()
        if chosen.framework == "pytorch":
            from trainprobe.config_check.capture.recorder import SettingsRecorder

            cls._recorder = SettingsRecorder(chosen)
            cls._recorder.guard.run(cls._recorder.start)

    @classmethod
    def stop(cls) -> None:
        """Take away what `apply_patches` has put in, where no ConfigChecker was made since."""
        if cls._recorder is not None:
            recorder, cls._recorder = cls._recorder, None
            recorder.finish()

    def __init__(
        self,
        model: Any = None,
        shell_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        output_zip_path: str | os.PathLike[str] = "./config_check_pack.zip",
        framework: str = "pytorch",
        *,
        fmk: str | None = None,
        optimizer: Any = None,
        **settings: Any,
    ) -> None:
        """Watch a model, or write the static pack at once where there is none.

        model: a torch module, or the list of its chunks; None captures what can be known without one. shell_path: shell,
        YAML or JSON files whose settings belong to the run. output_zip_path: the pack. optimizer: where it never steps through
        torch. Further settings: see `settings.Settings`. Raises PlanError, OutputError, FormatError on what cannot be used.
        """
        scripts = [shell_path] if isinstance(shell_path, str | os.PathLike) else list(shell_path or ())
        given = {
            "output": Path(output_zip_path),
            "framework": fmk or framework,
            "scripts": [str(s) for s in scripts],
            **settings,
        }
        self.settings = _with_environment(make_settings(given))
        self._own: SettingsRecorder | None = None
        refuse_foreign(self.settings.output)
        if model is None or self.settings.framework != "pytorch":
            self._write_static(model)
            return
        from trainprobe.config_check.capture.recorder import SettingsRecorder

        started = type(self)._recorder
        recorder = SettingsRecorder(self.settings) if started is None else started
        if started is None:
            recorder.guard.run(recorder.start)
        elif started.micro:
            raise UsageError("this process is being captured already: close the first ConfigChecker before making another")
        else:
            recorder.adopt(self.settings)
        type(self)._recorder = None
        self._own = recorder
        recorder.guard.run(recorder.attach, model)
        if optimizer is not None:
            recorder.guard.run(recorder.add_optimizer, optimizer)
        atexit.register(self.close)

    def _write_static(self, model: Any) -> None:
        from trainprobe.config_check.static_pack import write_static_pack

        type(self).stop()
        note = "no model was given: data, weights and randomness were not captured"
        if model is not None:
            note = "of a MindSpore run, data, weights and randomness are not captured"
        write_static_pack(self.settings, note)

    def release(self) -> None:
        """Take all patches away; the pack is written in the background, and `close` waits for it."""
        if self._own is not None:
            self._own.finish()

    def close(self) -> None:
        """Take all patches away and wait until the pack is on disk; a second call does nothing."""
        if self._own is not None:
            self._own.finish(wait=True)
            self._own = None
            atexit.unregister(self.close)

    def __enter__(self) -> ConfigChecker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _with_environment(settings: CapturedSettings) -> CapturedSettings:
    """Let TRAINPROBE_ON_ERROR decide what a fault of the tool does, as everywhere."""
    import dataclasses

    wish = os.environ.get("TRAINPROBE_ON_ERROR")
    return dataclasses.replace(settings, on_error=wish) if wish in ("continue", "raise") else settings
