//! Hosts, questions and course of `bench mesh`.

use std::ops::Range;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use hearthnet_files::sampling::SamplerConfig;
use hearthnet_orchestrator::chat::{AnswerOptions, ChatRequest, Done, Frame, Prompt, TurnOptions};
use hearthnet_orchestrator::placement::{missing, runs_text};
use hearthnet_orchestrator::service::ServiceSettings;
use hearthnet_orchestrator::service::prefix_cache::PrefixCacheLimits;
use hearthnet_orchestrator::{Cancel, ChatError, Service};
use hearthnet_tokens::ChatMessage;
use tokio::runtime::Runtime;

use crate::answering::chat_setup::settings;
use crate::answering::private_layers;
use crate::cli::args::{HostLayers, MeshArgs};
use crate::cli::{Failure, Kind, note, runtime, watch_interrupt};
use crate::config::{Config, Context};
use crate::hosting::host_process::{HostPlan, HostProcesses, split};
use crate::models::{OpenModel, open_or_pull_model};

/// Subjects of the chats. Each begins differently, so that the chats share no prefix.
const SUBJECTS: [&str; 8] = [
    "a lighthouse",
    "an old bridge",
    "the first snow",
    "a market in spring",
    "a lost letter",
    "two neighbours",
    "a night train",
    "an orchard",
];

/// Most host processes.
const MAX_HOSTS: usize = 64;

/// Time limit for the chats to end after the measurement.
const DRAIN_DEADLINE: Duration = Duration::from_secs(5);

/// Running hosts of a model's layers, the model, and the runtime of their caller.
pub(super) struct Setup {
    /// The first field: the hosts end before the runtime does.
    pub(super) hosts: HostProcesses,
    pub(super) assigned: Vec<HostLayers>,
    pub(super) model: OpenModel,
    pub(super) config: Config,
    cancel: Cancel,
    pub(super) runtime: Runtime,
}

/// Checks the arguments, opens the model and starts the hosts.
pub(super) fn start(args: &MeshArgs, cx: &Context) -> Result<Setup, Failure> {
    let mut cx = context(args, cx)?;
    // Audits would run between the measurements.
    cx.config.research.distributed_inference.audit_share = 0.0;
    let runtime = runtime()?;
    let cancel = watch_interrupt(&runtime);
    let mut model = open_or_pull_model(&cx, args.model.as_ref())?;
    private_layers::load(&mut model, args.private, at_once(args), &cx.config)?;
    let assigned = assigned(args, model.private.hosted())?;
    let plan = HostPlan {
        model: &model,
        config: &cx.config,
        streams: at_once(args),
    };
    let hosts = HostProcesses::start(&plan, &assigned, &cancel)?;
    Ok(Setup {
        hosts,
        assigned,
        model,
        config: cx.config,
        cancel,
        runtime,
    })
}

/// Most answers at once: all chats, or one chat and a prompt beside it.
fn at_once(args: &MeshArgs) -> usize {
    args.chats.max(2)
}

/// Checks the arguments, and returns the configuration of the bench.
fn context(args: &MeshArgs, cx: &Context) -> Result<Context, Failure> {
    if !(1..=64).contains(&args.chats)
        || args.repetitions == 0
        || args.prefill == 0
        || args.host.len() > MAX_HOSTS
    {
        return Err(Failure::new(
            Kind::Config,
            "--chats must lie between 1 and 64, --repetitions and --prefill must be at least 1, \
             and there may be 64 hosts",
        )
        .hint("see `hearthnet bench mesh --help`"));
    }
    let mut cx = cx.clone();
    // The command itself is the user's consent, and nothing leaves this machine.
    cx.config.policy.research.enable = true;
    let inference = &mut cx.config.research.distributed_inference;
    inference.max_concurrent_pipelines.0 = at_once(args);
    Ok(cx)
}

fn assigned(args: &MeshArgs, hosted: Range<u32>) -> Result<Vec<HostLayers>, Failure> {
    if args.host.is_empty() {
        let ranges = split(hosted, Some(args.shards), &[])?.into_iter();
        let host = |layers| HostLayers { layers, threads: 1 };
        return Ok(ranges.map(host).collect());
    }
    let mut held: Vec<(u32, u32)> = args.host.iter().map(|host| host.layers).collect();
    // The first layers may be private.
    held.extend(hosted.start.checked_sub(1).map(|last| (0, last)));
    let missing = missing(hosted.end, &held);
    if missing.is_empty() {
        return Ok(args.host.clone());
    }
    let what = format!("no --host holds layers {}", runs_text(&missing));
    Err(Failure::new(Kind::Config, what)
        .hint("give --host for each host, for example --host 0-14 --host 10-29:2"))
}

/// Settings of a service without a prefix cache, so that every chat runs its whole prompt.
pub(super) fn uncached(config: &Config) -> ServiceSettings {
    let settings = settings(config);
    ServiceSettings {
        keep: PrefixCacheLimits {
            count: 0,
            ..settings.keep
        },
        ..settings
    }
}

impl Setup {
    /// Runs a measurement until its end or an interrupt, and then ends the chats of `services`.
    pub(super) fn run<T>(
        &self,
        services: &[&Service],
        measure: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        self.runtime.block_on(async {
            let measured = tokio::select! {
                measured = measure => measured,
                () = self.cancel.cancelled() => Err(ChatError::Cancelled.into()),
            };
            for service in services {
                service.drain(DRAIN_DEADLINE).await;
            }
            measured
        })
    }
}

/// Tells the user what happens, unless the output is JSON.
pub(super) fn say(args: &MeshArgs, what: &str) {
    if !args.json {
        note(what);
    }
}

/// Tells the user that a round begins; round 0 warms up.
pub(super) fn say_round(args: &MeshArgs, round: u32) {
    match round {
        0 => say(args, "warming up"),
        n => say(args, &format!("round {n} of {}", args.repetitions)),
    }
}

pub(super) fn rate(tokens: usize, since: Instant) -> f64 {
    per_second(tokens, since.elapsed())
}

pub(super) fn per_second(tokens: usize, time: Duration) -> f64 {
    tokens as f64 / time.as_secs_f64().max(f64::MIN_POSITIVE)
}

/// Questions to one model.
pub(super) struct Questions {
    pub(super) model_id: String,
    vocabulary: u32,
    has_template: bool,
    prefill: u32,
    decode: u32,
    chats: usize,
}

impl Questions {
    pub(super) fn new(model: &OpenModel, service: &Service, args: &MeshArgs) -> Self {
        let served = service.model(&model.id);
        Self {
            model_id: model.id.clone(),
            vocabulary: model.file.spec().vocab,
            has_template: served.is_some_and(|served| served.text.template.is_some()),
            prefill: args.prefill,
            decode: args.decode,
            chats: args.chats,
        }
    }

    pub(super) async fn ask(
        &self,
        service: &Service,
        request: ChatRequest,
    ) -> Result<Done, Failure> {
        self.ask_and_hear(service, request, || ()).await
    }

    /// As [`Self::ask`], and calls `heard` for each token.
    pub(super) async fn ask_and_hear(
        &self,
        service: &Service,
        request: ChatRequest,
        mut heard: impl FnMut(),
    ) -> Result<Done, Failure> {
        let mut answer = service.ask("bench", &self.model_id, request)?;
        let mut end = None;
        while let Some(frame) = answer.next().await {
            match frame? {
                Frame::TokenDelta { .. } => heard(),
                Frame::Done(done) => end = Some(*done),
                _ => {}
            }
        }
        end.ok_or_else(|| Failure::internal("an answer ended without its last frame"))
    }

    /// Holds all chats at once. Returns their answers, and the tokens per second of all of them
    /// together, including their prompts.
    pub(super) async fn ask_all(&self, service: &Service) -> Result<(Vec<Done>, f64), Failure> {
        let began = Instant::now();
        let chats = (0..self.chats).map(|n| self.ask(service, self.chat(n)));
        let all = try_join_all(chats).await?;
        let tokens = all.iter().map(|done| done.token_ids.len()).sum();
        Ok((all, rate(tokens, began)))
    }

    /// Request with a prompt that differs from that of every other round, and one token of answer.
    pub(super) fn long_prompt(&self, round: u32) -> ChatRequest {
        // The engine does not care which tokens these are; only neighbours must differ.
        let token = |n: u32| (n.wrapping_mul(2_654_435_761) ^ round) % self.vocabulary;
        let ids = (1..=self.prefill).map(token).collect();
        request(Prompt::Tokens(ids), 1)
    }

    pub(super) fn chat(&self, n: usize) -> ChatRequest {
        self.chat_of(n, self.decode)
    }

    /// Chat with an answer of at most `tokens` tokens.
    pub(super) fn chat_of(&self, n: usize, tokens: u32) -> ChatRequest {
        let subject = SUBJECTS
            .get(n % SUBJECTS.len())
            .copied()
            .unwrap_or_default();
        let number = n / SUBJECTS.len() + 1;
        let ask = format!("Write story number {number} about {subject}, as long as you can.");
        let prompt = match self.has_template {
            true => Prompt::Messages(vec![ChatMessage::user(&ask)]),
            false => Prompt::Text(ask),
        };
        request(prompt, tokens)
    }
}

/// Greedy sampling (temperature 0), so that answers can be compared.
fn request(prompt: Prompt, max_tokens: u32) -> ChatRequest {
    ChatRequest {
        prompt,
        sampling: SamplerConfig {
            temperature: 0.0,
            ..SamplerConfig::default()
        },
        max_tokens: Some(max_tokens),
        stop: Vec::new(),
        exact: None,
        grammar: None,
        turn: TurnOptions::default(),
        options: AnswerOptions::default(),
    }
}
