# The stages of a run as shell functions, sourced by scales/*.sh, which say where the settings of a scale stand:
#   SCALE     name: runs lie in runs/$SCALE
#   MODELS    folder of the architectures
#   SETTINGS  folder with eval.yaml and analyse.yaml
#   PRETRAIN, EXTEND  training settings: a file, and what to change in it
#   LAUNCH    settings of accelerate
# A RUN is a folder with pretrain/, extend/, evaluation/; a finished stage is not run again, a killed one resumes.

fetch() { # what `evaluate` reads, or what is missing, before days of training
    python scripts/fetch_suite.py "$SETTINGS/eval.yaml"
}

pretrain() { # RUN MODEL [a.b=value ...]
    run=runs/$SCALE/$1 architecture=$MODELS/$2.json
    shift 2
    accelerate launch --config_file "$LAUNCH" scripts/pretrain.py --config $PRETRAIN \
        model.config="$architecture" run.output_dir="$run/pretrain" "$@"
}

extend() { # RUN [a.b=value ...]: longer windows, weights only, new optimizer
    run=runs/$SCALE/$1
    shift
    accelerate launch --config_file "$LAUNCH" scripts/pretrain.py --config $EXTEND \
        model.config="$run/pretrain/final" model.init_from="$run/pretrain/final" run.output_dir="$run/extend" "$@"
}

upcycle() { # FROM RUN E [arguments of upcycle.py ...]: RUN begins its extension as FROM, widened to E slices
    from=runs/$SCALE/$1/pretrain/final to=runs/$SCALE/$2/pretrain/final slices=$3
    shift 3
    python scripts/upcycle.py "$from" "$to" --second_key_dim "$slices" "$@"
}

evaluate() { # RUN
    scripts/eval.sh "runs/$SCALE/$1/extend" --suite "$SETTINGS/eval.yaml" --output "runs/$SCALE/$1/evaluation"
}

analyse() { # RUN
    python scripts/analyse.py "runs/$SCALE/$1/extend" --config "$SETTINGS/analyse.yaml" --output "runs/$SCALE/$1/analysis"
}

collect() { # RECIPE
    python recipes/collect.py "recipes/$1" --scale "$SCALE"
}
