"""The lab: prepare data, train, evaluate, compare, analyse, report.

Data flows through files. Every arrow below is a folder or a file, so each stage can be rerun,
tested and replaced alone::

    recipe.yaml --train--> RUN/ --evaluate--> RUN/records/ --analyze--> RUN/analysis.json --> report
    corpus --prepare--> folder --^              (compare and reproduce: many runs, one table)
    RUN/ --calibrate--> RUN/best/calibration.json

What is where, lowest layer first. A module imports only from its own line and from lines above it.
A task is named in ``tasks.TASKS`` and nowhere else outside of its own package:

==================  ===============================================================================
errors              the two ways a command ends early, and wrong data
config              sections of a recipe, YAML, messages for wrong keys
run/                a run on disk: directory, checkpoint, checksums, lock; seeds, processes
compressed          compressed files, with a limit on what they inflate to
pretrained          a model folder to start from: loading, freezing, LoRA
tables              a table as Markdown, LaTeX, CSV and JSON
tasks               the protocol of a task, and the dict ``TASKS``
teachers            where a second distribution comes from
methods             ``METHODS``: a loss, perhaps a teacher, for every method
recipes             a recipe file with overrides -> a checked recipe
optim, train        the optimizer, the learning rate, the one training loop
average             the mean of models that a run kept -> a model folder
calibrate           a temperature for the selected model of a run
evaluate            the selected model of a run -> scores and records
analysis/           records -> analysis.json; which runs belong together; differences and p-values
report/             analysis -> one HTML page
text/               what tasks on text share: lines, subwords, prepared folders, token records
images/             a task: data sources, augmentation, networks, scores, its analysis
translation/        a task: prepare, subwords, model, beam search, BLEU, its analysis
language_modeling/  a task: documents, packing, causal models, generation, its analysis
compare/            one recipe, several methods and seeds: plan, launch, execute, table
reproduce/          the paper's tables and figures
demo                ``labo demo``
==================  ===============================================================================
"""
