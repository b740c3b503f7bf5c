"""What a plan can ask for beside the dump: one file a program. Its name is that of the section of the plan.

Its docstring says in `docs/plan.md` what the section is. It has

    validate(settings)     returns the settings of the section, a pydantic model; raises PlanError on what it cannot use
    program(making)        returns the `Program` that carries out the section (see `engine.program.Making`)
    schedule(plan, taps)   asks for taps and returns when they run (`engine.taps.Taps`); without one, the program says so itself
    may_dump(plan)         whether it may ask for a dump where the plan's level is off; without one, it does not
    WATCHES                what it watches, for the line at the start of a run; it may be left out
    ORDER                  programs are called in this order at each event; without one, after all others
    NOT_UNDER              framework → why the section cannot be carried out under it; without one, it can be under all
"""
