#!/usr/bin/env bash
# Reinforcement learning on the embedded task: what each reward and estimator makes of pocket's policy, and how far
# reward models can be trusted. Trains the reward models of the quickstart first; finished runs are kept, broken ones
# go on where they were.
#
#   run_scripts/rl_study.sh [SETTING ...]         # one, several or all of those below
#
# OUT (runs/rl), SEEDS ("0 1 2"), ROLLOUTS (20), JOBS (runs side by side, one core each: 2) can be set.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
bash build_scripts/install.sh
export PATH="$root/.venv/bin:$PATH"
OUT=${OUT:-runs/rl}
SEEDS=${SEEDS:-0 1 2}
ROLLOUTS=${ROLLOUTS:-20}
JOBS=${JOBS:-2}
REWARD_MODELS=$OUT/reward_models

finished() { [[ -f $1/manifest.json ]] && grep -q '"status": "finished"' "$1/manifest.json"; }

# Flags by setting. -kl: with a penalty that holds the policy near its start; the others have none.
declare -A FLAGS=(
    [rule-gae]="--advantage_estimator gae --critic_learning_rate 1e-3"
    [rule-rloo]="--advantage_estimator rloo"
    [rule-group_norm]="--advantage_estimator group_norm"
)
for model in vanilla contrastive; do
    FLAGS[$model]="--advantage_estimator gae --critic_learning_rate 1e-3 --reward_pretrain MODELS/$model"
    FLAGS[$model-kl]="${FLAGS[$model]} --init_kl_coef 0.2"
done
shaping="--goal_state_path MODELS/goals/contrastive/goal_state.npy --goal_shaping_coef 1"
FLAGS[shaping]="${FLAGS[contrastive]} $shaping"
FLAGS[shaping-kl]="${FLAGS[contrastive-kl]} $shaping"

train() { # setting, seed
    local flags=${FLAGS[$1]} folder=$OUT/$1/seed-$2
    finished "$folder" && return
    [[ $flags == *--init_kl_coef* ]] || flags="$flags --init_kl_coef 0"
    local log=$OUT/logs/$1-seed-$2.txt
    mkdir -p "$OUT/logs"
    python examples/train_ppo.py --pretrain pocket --prompt_data pocket --max_samples $((64 * ROLLOUTS)) \
        --rollout_batch_size 64 --n_samples_per_prompt 4 --train_batch_size 64 --generate_max_len 64 \
        --actor_learning_rate 1e-4 --lr_scheduler constant --eval_steps 2 --save_steps 5 --load_checkpoint --seed "$2" \
        --save_path "$folder" --ckpt_path "$OUT/checkpoints/$1-seed-$2" ${flags//MODELS/$REWARD_MODELS/seed-$2} \
        >"$log" 2>&1 || { tail -n 5 "$log" >&2; return 1; }
    echo "$1, seed $2: $(grep -o 'step [0-9]*, held-out prompts.*' "$log" | tail -n 1)"
}

settings=("$@")
[[ $# -gt 0 ]] || \
    settings=(rule-gae rule-rloo rule-group_norm contrastive-kl shaping-kl vanilla-kl vanilla contrastive shaping)
for setting in "${settings[@]}"; do
    [[ -v FLAGS[$setting] ]] || { echo "no setting $setting; there are: ${!FLAGS[*]}" >&2; exit 2; }
done
export OMP_NUM_THREADS=1
python examples/quickstart.py --output "$REWARD_MODELS" --seeds "${SEEDS// /,}"
failed=0
for seed in $SEEDS; do
    for setting in "${settings[@]}"; do
        while (($(jobs -rp | wc -l) >= JOBS)); do wait -n || failed=1; done
        train "$setting" "$seed" &
    done
done
for job in $(jobs -p); do wait "$job" || failed=1; done

compare() { # name, settings: pages, pictures and tables of those that have a run
    local name=$1 runs=()
    shift
    for setting in "$@"; do
        for seed in $SEEDS; do
            [[ ! -d $OUT/$setting/seed-$seed ]] || runs+=("$OUT/$setting/seed-$seed")
        done
    done
    [[ ${#runs[@]} -eq 0 ]] || python examples/rl_report.py "${runs[@]}" --by_folder --save_dir "$OUT/$name" \
        --metrics eval/gold_reward eval/reward train/entropy train/response_length | tee "$OUT/$name.md"
}
compare learning rule-gae rule-rloo rule-group_norm contrastive-kl shaping-kl
compare overoptimisation vanilla-kl contrastive-kl shaping-kl vanilla contrastive shaping
exit $failed
