"""``leafward completion SHELL``: a completion script for the whole command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from rich.console import Console


@dataclass
class Args:
    shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional]
    """Which shell. For bash: leafward completion bash > ~/.local/share/bash-completion/completions/leafward"""


def run(args: Args, console: Console) -> dict[str, Any]:
    script = _bash() if args.shell == "bash" else "autoload -U +X bashcompinit && bashcompinit\n" + _bash()
    console.out(script, end="")
    return {"shell": args.shell, "script": script}


def _bash() -> str:
    """Completes commands, then what they choose from, then flags, then file names.

    Flags are asked of ``--help``; the group of a name may be left out.
    """
    from leafward.cli.commands import COMMANDS
    from leafward.systems import PREPARATIONS, TRAININGS

    return f"""_leafward() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" words
  if [ "$COMP_CWORD" -eq 1 ]; then words="{" ".join(COMMANDS)} --help --version"
  elif [ "$COMP_CWORD" -eq 2 ] && [ "$command" = train ]; then words="{" ".join(TRAININGS)}"
  elif [ "$COMP_CWORD" -eq 2 ] && [ "$command" = data ]; then words="{" ".join(PREPARATIONS)}"
  elif [ "$COMP_CWORD" -eq 2 ] && [ "$command" = bench ]; then words="$(leafward bench 2>/dev/null | cut -c3-23)"
  elif [ "$COMP_CWORD" -eq 2 ] && [ "$command" = completion ]; then words="bash zsh"
  elif [[ "$current" == -* ]]; then
    local chosen=""; [[ "$command" == train || "$command" == data ]] && chosen="${{COMP_WORDS[2]}}"
    words="$(leafward "$command" $chosen --help 2>/dev/null | grep -oE -- '--([a-z][a-z-]*[.])*[a-z][a-z-]+')"
    words="$(sed -E 'p; s/^--.*[.]/--/' <<< "$words" | sort -u)"
  else COMPREPLY=($(compgen -f -- "$current")); return; fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o filenames -F _leafward leafward
"""
