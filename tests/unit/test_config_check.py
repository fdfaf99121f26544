"""Rules that span sections, the formula that a run prints, and the summary of a dry run."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from opd.config import load_recipe, method_rules
from opd.config.check import PROVIDES, check, dry_run_summary
from opd.config.formula import formula, objective, on_policy, solution_weight
from opd.config.loss import MixConfig
from opd.config.resolved import resolved_yaml
from opd.config.schema import Recipe
from opd.config.shape import Slot, names_of
from opd.errors import OpdError
from opd.loss import build

BASE: dict[str, Any] = {
    "name": "small",
    "student": {"model": "some/model"},
    "context": {"name": "reference_solution"},
    "data": {"train": {"name": "task", "task": "products"}},
    "train": {"num_steps": 10, "num_problems_per_step": 4, "learning_rate": 1e-3},
    "eval": {"data": {"name": "task", "task": "products", "split": "heldout"}},
}


def recipe(*overrides: str) -> Recipe:
    return load_recipe(BASE, overrides).recipe


def test_a_plain_recipe_and_the_packaged_ones_pass_without_warnings() -> None:
    assert check(recipe()) == []
    assert check(load_recipe("demo").recipe) == []


STUDENT = "prompt.student=[{role: user, content: '{{ problem }}'}]"


def teacher(content: str) -> str:
    return f'prompt.teacher=[{{role: user, content: "{content}"}}]'


def mix(first: str, second: str, more: str = "") -> str:
    parts = f"[{{loss: {{name: {first}}}, weight: 1}}, {{loss: {{name: {second}}}, weight: 0.1}}]"
    return f"loss={{name: mix, parts: {parts}{more}}}"


def demonstration(content: str, role: str = "assistant") -> str:
    return (
        f'prompt.demonstration=[{{role: user, content: "{{{{ problem }}}}"}}, {{role: {role}, content: "{content}"}}]'
    )


BASELINE = "sampled_reverse_kl, group_baseline: true"
SAMPLES = "rollout.num_samples=2"


@pytest.mark.parametrize(
    ("overrides", "what", "fix"),
    [
        # teacher
        (["context.name=none"], "the teacher is the student", "context.name=reference_solution"),
        (["context.name=none", "teacher.weights.name=live"], "the teacher is the student", "teacher.name=model"),
        (["context.name=none", "teacher.weights.name=ema"], "the teacher is the student", "teacher.name=model"),
        (
            ["context.name=none", "teacher={name: model, model: some/model}"],
            "the teacher is the student",
            "name a larger model",
        ),
        # loss
        (["loss={name: jsd, teacher_weight: 0}"], "`loss.teacher_weight` is 0", "loss.name=forward_kl"),
        (["loss={name: jsd, teacher_weight: 1}"], "`loss.teacher_weight` is 1", "loss.name=reverse_kl"),
        (["loss={name: jsd, teacher_weight: -2}"], "`loss.teacher_weight` is -2", "loss.teacher_weight=0.5"),
        (
            ["loss.name=sampled_reverse_kl", "rollout.temperature=0"],
            "needs sampled completions",
            "rollout.temperature=1",
        ),
        (["loss.name=sft"], "loss `sft` alone is not on-policy", "loss={name: mix, parts:"),
        ([mix("sft", "sft")], "a mix of nothing but `sft` is not on-policy", "loss={name: mix, parts:"),
        (
            [mix("forward_kl, mask: {first: 3}", "sft")],
            "`loss.parts.0.loss.mask` is set",
            "set loss.mask instead",
        ),
        (
            [mix("forward_kl", "sft, reduction: sequence")],
            "`loss.parts.1.loss.reduction` is set",
            "set loss.reduction instead",
        ),
        (
            [mix(BASELINE, BASELINE + ", discount: 0.5"), SAMPLES],
            "a `group_baseline` of different advantages",
            "the same temperature and discount",
        ),
        (
            ["loss.mask={first: 1, skip_boundary: true}"],
            "`loss.mask` leaves out every token",
            "loss.mask.first=2 or more",
        ),
        (
            ["loss.mask.skip_boundary=true", "rollout.max_new_tokens=1"],
            "`loss.mask.skip_boundary` leaves out every token",
            "raise rollout.max_new_tokens",
        ),
        (
            ["loss.mask.student_entropy={min: 0}"],
            "`loss.mask.student_entropy` leaves nothing out",
            "loss.mask.student_entropy=null",
        ),
        (
            ["loss.mask.teacher_entropy={min: 2, max: 1}"],
            "`loss.mask.teacher_entropy` leaves out every token",
            "to at most loss.mask.teacher_entropy.max",
        ),
        (
            ["loss.mask.teacher_entropy={max: 0}"],
            "`loss.mask.teacher_entropy` leaves out every token",
            "loss.mask.teacher_entropy.max=0.1",
        ),
        (
            ["loss={name: sampled_reverse_kl, mask: {teacher_entropy: {max: 1}}}"],
            "`loss.mask.teacher_entropy` cannot be computed",
            "student_entropy",
        ),
        (
            [mix("sampled_reverse_kl", "sft", ", mask: {teacher_entropy: {max: 1}}")],
            "`loss.mask.teacher_entropy` cannot be computed",
            "a divergence such as reverse_kl",
        ),
        (
            [mix("forward_kl, temperature: 2", "reverse_kl", ", mask: {student_entropy: {max: 1}}")],
            "an entropy gate of `loss.mask` has no temperature",
            "the same temperature",
        ),
        (
            ["loss={name: sampled_reverse_kl, group_baseline: true}"],
            "`loss.group_baseline` has no group",
            "rollout.num_samples=2",
        ),
        # sampling
        (["rollout.temperature=0", "rollout.num_samples=2"], "`rollout.num_samples` is 2", "rollout.num_samples=1"),
        (["rollout.temperature=0", "rollout.top_p=0.9"], "`rollout.top_p` is not used", "rollout.top_p=1"),
        (["rollout.temperature=0", "rollout.top_k=5"], "`rollout.top_k` is not used", "rollout.top_k=null"),
        (["rollout.temperature=0", "rollout.min_p=0.1"], "`rollout.min_p` is not used", "rollout.min_p=0"),
        (["eval.sampling.temperature=0"], "`eval.num_samples` is 4", "eval.num_samples=1"),
        # student
        (
            ["student.adapter.name=full", "rollout.merge_adapter=true"],
            "`rollout.merge_adapter`",
            "student.adapter.name=lora",
        ),
        (
            ["student.attention=flash_attention_2", "student.dtype=float32"],
            "flash_attention_2 with student.dtype=float32",
            "student.dtype=bfloat16",
        ),
        (
            ["student.model=package:x", "student.revision=main"],
            "`student.revision` is not used",
            "student.revision=null",
        ),
        (
            ["student.model=gguf:x", "student.trust_remote_code=true"],
            "`student.trust_remote_code` is not used",
            "student.trust_remote_code=false",
        ),
        # prompts
        (
            ["context.name=none", "context.num_demonstrations=2", STUDENT, teacher("Think. {{ problem }}")],
            "`context.num_demonstrations` is not used",
            "context.num_demonstrations=0",
        ),
        (["context.name=demonstrations"], "shows no demonstration", "context.num_demonstrations=3"),
        ([demonstration("{{ solution }}")], "`prompt.demonstration` is not used", "prompt.demonstration=null"),
        (
            [
                "context.num_demonstrations=2",
                demonstration("{{ solution }}"),
                teacher("{{ demonstrations[0].solution }} {{ solution }} {{ problem }}"),
            ],
            "`prompt.demonstration` is not used",
            "take `demonstrations` out",
        ),
        (
            ["context.num_demonstrations=2", demonstration("I do not know")],
            "`prompt.demonstration` shows no solution",
            "{{ solution }}",
        ),
        (
            ["context.num_demonstrations=2", demonstration("{{ solution }}", "user")],
            "`prompt.demonstration` is not a conversation that ends with the assistant",
            "assistant's message last",
        ),
        ([teacher("{{ problem }}")], "the teacher is never shown the context `reference_solution`", "{{ solution }}"),
        (
            ["context.name=none", teacher("{{ problem }} {{ solution }}")],
            "`prompt.teacher.0.content` uses `solution`",
            "{% if solution %}",
        ),
        (
            ["prompt.student=[{role: user, content: '{{ solution }}'}]"],
            "may not use 'solution'",
            "move it to prompt.teacher",
        ),
        (["prompt.student=[{role: user, content: '{{ problm }}'}]"], "may not use 'problm'", "problem"),
        (["prompt.student=[{role: user, content: '{{ problem'}]"], "cannot be rendered", "mend prompt.student"),
        (["prompt.student=[]"], "prompt.student has no message", "remove the key"),
        (
            ["prompt.student=[{role: assistant, content: '{{ problem }}'}]"],
            "`prompt.student` is not a conversation that ends with the user",
            "user's message last",
        ),
        # training
        (["train.schedule.num_warmup_steps=10"], "is 10 of 10 steps", "train.schedule.num_warmup_steps=1"),
        (["train.schedule.final_frac=0.1"], "`train.schedule.final_frac` is not used", "train.schedule.name=cosine"),
        (["train.betas=[0.9, 1]"], "`train.betas.1` is 1", "train.betas=[0.9, 0.999]"),
        (["log.project=mine"], "`log.project` is not used", "log.trackers=[tensorboard]"),
        # data
        (
            ["eval.data.split=train", "eval.data.seed=7"],
            "`eval.data` holds the training problems",
            "eval.data.split=heldout",
        ),
        (["eval.data.options={heldout_frac: 0.4}"], "`eval.data` holds the training problems", "the same heldout_frac"),
        (
            ["data.train={name: file, path: x/../a.jsonl}", "eval.data={name: file, path: a.jsonl}"],
            "`eval.data` holds the training problems",
            "split the file in two",
        ),
        (
            ["data.train={name: hub, dataset: gsm8k}", "eval.data={name: hub, dataset: gsm8k}"],
            "`eval.data` holds the training problems",
            "eval.data.split=test",
        ),
        (
            ["data.train.num_problems=3", "context.num_demonstrations=3"],
            "`data.train.num_problems` is 3",
            "num_problems=4",
        ),
        (
            ["data.train.num_problems=3", "context={name: placebo, num_demonstrations: 2}"],
            "`data.train.num_problems` is 3",
            "num_problems=4",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_a_fix(overrides: list[str], what: str, fix: str) -> None:
    with pytest.raises(OpdError) as caught:
        check(recipe(*overrides))
    assert what in caught.value.what
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["loss.clip={name: per_entry, max: 0.05}"], "loss.clip.name=per_entry"),
        (["loss.mask.first=600"], "loss.mask.first=600 and rollout.max_new_tokens=512"),
        (["loss.mask.last=600"], "loss.mask.last=600 and rollout.max_new_tokens=512"),
        (["student.adapter.name=full"], "train.learning_rate=0.001 with full fine-tuning"),
        (
            ["student.adapter.name=full", "train.learning_rate=1e-5"],
            "full fine-tuning with teacher.weights.name=initial",
        ),
        (["teacher={name: model, model: some/model}"], "teacher.model is the student's own model"),
        (["loss.name=sampled_reverse_kl", "rollout.temperature=0.7"], "rollout.temperature=0.7 and loss.temperature=1"),
        (["loss.name=sampled_reverse_kl", "rollout.top_p=0.9"], "cut the distribution that is sampled"),
        (["student.trust_remote_code=true"], "student.trust_remote_code is true"),
        (["train.checkpoint_every_num_steps=20"], "train.checkpoint_every_num_steps=20 is more"),
        (["prompt.student_thinking=false"], "prompt.student_thinking is False and prompt.teacher_thinking is null"),
        (["prompt.student_thinking=true", "prompt.teacher_thinking=true"], "rollout.max_new_tokens=512"),
        (["data.train.num_problems=3"], "train.num_problems_per_step=4 and data.train.num_problems=3"),
        (
            [
                "data.train={name: hub, dataset: g, split: 'train[:90%]'}",
                "eval.data={name: hub, dataset: g, split: 'train[90%:]'}",
            ],
            "are cut from the same split",
        ),
        ([teacher("{{ solution }} {{ demonstrations }}")], "prompt.teacher uses `demonstrations`"),
    ],
)
def test_what_runs_but_is_probably_not_meant_is_a_warning(overrides: list[str], what: str) -> None:
    assert any(what in warning.what for warning in check(recipe(*overrides)))


@pytest.mark.parametrize(
    "overrides",
    [
        ["teacher.weights.name=live"],
        ["teacher.weights.name=ema"],
        ["context.name=none", teacher("Think first. {{ problem }}{% if solution %} {{ solution }}{% endif %}")],
        ["context.name=none", teacher("{{ 'Hint: ' ~ answer if answer else '' }} {{ problem }}")],
        ["context.name=none", "teacher={name: model, model: other/model}"],
        ["context.name=answer_only", teacher("{{ answer }} {{ problem }}")],
        ["rollout.temperature=0"],
        ["loss.mask={first: 512, last: 512, skip_boundary: true, skip_special_tokens: true, skip_whitespace: true}"],
        ["loss.mask={first: 1, last: 1, skip_boundary: true}"],
        ["loss.mask={teacher_entropy: {min: 1, max: 1}, student_entropy: {min: 0.1}}", "loss.reduction=sequence"],
        [mix("forward_kl", "sft", ", reduction: sequence, mask: {first: 9}")],
        [mix("forward_kl, temperature: 2", "sft", ", mask: {teacher_entropy: {max: 1}}")],
        [mix(BASELINE, BASELINE), SAMPLES],
        ["data.train.options={heldout_frac: 0.4}", "eval.data.options={heldout_frac: 0.4}"],
        ["train.schedule.num_warmup_steps=9"],
    ],
)
def test_what_works_is_let_through_without_a_word(overrides: list[str]) -> None:
    assert check(recipe(*overrides)) == []


def test_a_teacher_model_gets_no_context_by_default_without_a_word() -> None:
    base = {
        "name": "small",
        "student": {"model": "some/model"},
        "teacher": {"name": "model", "model": "other/model"},
        "data": {"train": {"name": "task", "task": "products"}},
        "train": {"num_steps": 10, "num_problems_per_step": 4, "learning_rate": 1e-3},
    }
    (warning,) = check(load_recipe(base).recipe)
    assert "context.name=none" in warning.fix


def test_all_faults_come_at_once() -> None:
    with pytest.raises(OpdError) as caught:
        check(recipe("rollout.temperature=0", "rollout.top_k=3", "log.project=x", "train.betas=[2, 3]"))
    assert caught.value.what == "recipe 'small' has 4 errors"
    assert caught.value.fix.count("\n") == 4


def test_every_teacher_of_the_schema_stands_in_the_table() -> None:
    teachers = {name for config in Slot(Recipe.model_fields["teacher"].annotation).configs for name in names_of(config)}
    assert set(PROVIDES) == teachers


def test_a_loss_that_needs_more_than_the_teacher_gives_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(method_rules, "PROVIDES", {**PROVIDES, "self": frozenset({"Sampled"})})
    with pytest.raises(OpdError) as caught:
        check(recipe())
    assert caught.value.why == "it needs Full, and the teacher provides Sampled"
    assert "another teacher.name or loss.name" in caught.value.fix
    assert check(recipe("loss.name=sampled_reverse_kl")) == []


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("loss.name=forward_kl", "KL(p‖q), p = softmax(z_teacher/1), q = softmax(z_student/1)"),
        ("loss={name: reverse_kl, temperature: 2}", "KL(q‖p), p = softmax(z_teacher/2), q = softmax(z_student/2)"),
        ("loss={name: forward_kl, temperature: 2, scale_by_temperature_squared: true}", "2²·[KL(p‖q)], p"),
        ("loss={name: jsd, teacher_weight: 0.3}", "w·KL(p‖m) + (1-w)·KL(q‖m) with w = 0.3, m = w·p + (1-w)·q, p"),
        ("loss={name: forward_kl, clip: {name: per_token, max: 2}}", "min(D, 2), D = KL(p‖q), p"),
        ("loss={name: forward_kl, clip: {name: weight, max: 2}}", "D·min(1, 2/sg(D)), D = KL(p‖q), p"),
        (
            "loss={name: forward_kl, clip: {name: per_entry, max: 0.05}}",
            "Σ_v min(d_v, 0.05), d_v = p_v·log(p_v/q_v), p",
        ),
        (
            "loss={name: reverse_kl, clip: {name: per_entry, max: 0.05}}",
            "Σ_v min(d_v, 0.05), d_v = q_v·log(q_v/p_v), p",
        ),
        ("loss.name=sampled_reverse_kl", "-A_t·log q(y_t), A_t = sg(log p(y_t) - log q(y_t)), p"),
        (
            "loss={name: sampled_reverse_kl, discount: 0.5, max_advantage: 3, importance: {clip: 2}}",
            "-A_t·sg(min(exp(log q(y_t) - behavior_logp_t), 2))·log q(y_t), "
            "A_t = sg(clamp(Σ_k 0.5^k·(log p(y_t+k) - log q(y_t+k)), ±3)), p",
        ),
    ],
)
def test_the_formula_says_every_option_that_is_on(override: str, expected: str) -> None:
    assert formula(recipe(override).loss).startswith(expected)


def test_the_objective_of_a_recipe_says_that_sft_is_on_given_solutions() -> None:
    loss = recipe(mix("forward_kl", "sft", ", mask: {first: 9}")).loss
    text = objective(loss)
    assert text.startswith("1·[KL(p‖q)")
    assert "the first 9 tokens; plus 0.1·[-log q(s_t)], s the problem's own solution" in text
    assert "y_t" not in text
    assert objective(recipe().loss) == formula(recipe().loss)
    assert text in dry_run_summary(load_recipe(BASE, [mix("forward_kl", "sft", ", mask: {first: 9}")])).plain
    assert solution_weight(loss) == 0.1
    sampled = on_policy(loss)
    assert isinstance(sampled, MixConfig)
    assert [part.loss.name for part in sampled.parts] == ["forward_kl"]
    assert sampled.mask == loss.mask


def test_a_resolved_mix_is_a_recipe_without_faults() -> None:
    """`resolved.yaml` writes the defaults of every part, and a default is no choice of its own."""
    loaded = load_recipe(BASE, [mix("forward_kl", "sft", ", reduction: sequence")])
    again = load_recipe(yaml.safe_load(resolved_yaml(loaded.recipe, loaded.provenance))).recipe
    assert again == loaded.recipe
    assert check(again) == []


@pytest.mark.parametrize(
    "config",
    [
        {"name": "sampled_reverse_kl", "mask": {"teacher_entropy": {"max": 1.0}}},
        {"name": "sft", "mask": {"teacher_entropy": {"max": 1.0}}},
        {"name": "reverse_kl", "mask": {"student_entropy": {"min": 2.0, "max": 1.0}}},
        {"name": "mix", "parts": [{"loss": {"name": "tvd", "mask": {"first": 3}}, "weight": 1.0}]},
    ],
)
def test_a_loss_that_contradicts_itself_cannot_be_built_either(config: dict[str, Any]) -> None:
    with pytest.raises(OpdError, match="The loss config: "):
        build(config)


def test_a_dry_run_says_what_would_happen() -> None:
    loaded = load_recipe("demo", ["train.num_steps=10", "loss.temperature=2", "loss.clip={name: per_entry, max: 0.1}"])
    train, rollout = loaded.recipe.train, loaded.recipe.rollout
    budget = 10 * train.num_problems_per_step * rollout.num_samples * rollout.max_new_tokens
    text = dry_run_summary(loaded).plain
    for expected in (
        "recipes/demo.yaml < override",
        "package:smollm2-135m-instruct in bfloat16",
        "the student itself with initial weights",
        "p = softmax(z_teacher/2)",
        "rollout 1, loss 2",
        f"= at most {budget:,} sampled",
        "warning  loss.clip.name=per_entry",
    ):
        assert expected in text
    with pytest.raises(OpdError):
        dry_run_summary(load_recipe("demo", ["train.num_steps=1", "train.schedule.num_warmup_steps=1"]))
