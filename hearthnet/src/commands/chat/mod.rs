//! `hearthnet chat`: one question, or a conversation.
//!
//! Chooses the source of the answer and prepares it: the service on this machine, hosts, or this
//! machine alone. The rest is in `chat/`:
//!
//! | concept | file |
//! |---|---|
//! | the question of a command line: words, files, standard input | `question.rs` |
//! | a conversation on a terminal, or with a program | `session.rs` |
//! | typed lines and commands | `editor/`, `command.rs` (pure) |
//! | one answer, from the service, from hosts or from this process | `turns.rs` |
//! | display of an answer | `screen.rs` |
//! | Ctrl-C | `interrupt.rs` |
//! | conversations in files | `saved.rs` |

mod command;
mod editor;
mod interrupt;
mod question;
mod saved;
mod screen;
mod session;
mod turns;

use std::cell::OnceCell;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearthnet_hub::ModelRef;
use hearthnet_hub::catalogue::Resolved;
use hearthnet_orchestrator::chat::{Conversation, Prompt};
use hearthnet_orchestrator::exact::Exact;
use hearthnet_orchestrator::hosts::HostPool;
use hearthnet_orchestrator::service::ServedModel;
use hearthnet_orchestrator::{Cancel, ChatError};
use hearthnet_tokens::grammar::MAX_GRAMMAR_BYTES;
use hearthnet_tokens::{ChatMessage, Grammar};
use tokio::runtime::Runtime;

use self::interrupt::Interrupts;
use self::question::question;
use crate::answering::chat_backends::{pooled_hosts, transient_hosts};
use crate::answering::chat_setup::{converse, hosted_model, local_model};
use crate::answering::local_service::{AskedService, Found, find_service};
use crate::answering::private_layers;
use crate::cli::args::{ChatArgs, PrivateArgs, SamplingArgs};
use crate::cli::{Failure, Kind, Spinner, TerminalStyle, failure, note, runtime};
use crate::config::{Config, Context};
use crate::home::{Home, now_ms};
use crate::models::adopted::only_whole;
use crate::models::{open_model, open_resolved, resolve};
use crate::node::{Process, TransientNode, find_home};

pub(crate) fn run(args: ChatArgs, cx: &Context) -> Result<(), Failure> {
    let started = Instant::now();
    args.sampling.check()?;
    let grammar = args.json_schema.as_deref().map(json_schema).transpose()?;
    let runtime = runtime()?;
    let style = TerminalStyle::of_this_terminal();
    let mut chat = Chat {
        args: &args,
        cx,
        runtime: &runtime,
        interrupts: Interrupts::watch(&runtime, style, args.json),
        style,
        model: args.model.clone(),
        resolved: None,
        sampling: args.sampling.clone(),
        grammar,
        explain: args.explain,
        interactive: false,
        cancel: Cancel::default(),
        service: None,
        left_out: None,
        begun: None,
        goes_on: false,
        own: None,
    };
    let outcome = chat.run(started);
    if let Some(own) = chat.own {
        // Tasks close the streams; let them finish before the runtime shuts down.
        drop(own.conversation);
        runtime.block_on(own.transient.end());
    }
    runtime.shutdown_timeout(Duration::from_millis(500));
    outcome
}

struct Chat<'a> {
    args: &'a ChatArgs,
    cx: &'a Context,
    runtime: &'a Runtime,
    interrupts: Interrupts,
    style: TerminalStyle,
    /// Model if it was named, sampling, and whether the times of each answer are shown. Commands in
    /// a conversation may change them.
    model: Option<ModelRef>,
    sampling: SamplingArgs,
    explain: bool,
    /// Grammar that every answer follows.
    grammar: Option<Grammar>,
    /// File of the named or configured model, once it was searched for.
    resolved: Option<Result<Resolved, Failure>>,
    /// Whether the input is typed on a terminal.
    interactive: bool,
    /// Cancels the answer in progress.
    cancel: Cancel,
    /// Service on this machine that answers, if any.
    service: Option<AskedService>,
    /// Note about a service on this machine that does not respond.
    left_out: Option<String>,
    /// Model with which the service answered before it ended.
    begun: Option<Resolved>,
    /// True while this process continues an answer that the service started; requires exact hosts.
    goes_on: bool,
    /// State for answers of this process, once it needs to answer.
    own: Option<LocalBackend>,
}

struct LocalBackend {
    model: ServedModel,
    /// Hosts named on the command line.
    named: Option<HostPool>,
    /// Community whose hosts answer.
    home: Option<Home>,
    transient: TransientNode,
    /// Conversation so far; `None` after an answer that was not completed.
    conversation: Option<Conversation>,
}

impl Chat<'_> {
    /// Returns a function that names a host. Reads the members at its first use.
    fn names(&self) -> impl Fn(&str) -> String + use<> {
        let home = self.own.as_ref().and_then(|own| own.home.clone());
        let (cx, known) = (self.cx.clone(), OnceCell::new());
        move |host| {
            let known = known.get_or_init(|| {
                let home = home.clone().or_else(|| find_home(&cx).ok().flatten());
                home.map(|home| home.state())
            });
            let named = known.as_ref().zip(host.parse().ok());
            match named.filter(|(state, id)| state.member(id).is_some()) {
                Some((state, id)) => state.label(&id, now_ms()),
                // `ed25519:` and nine more characters are enough to tell nodes apart.
                None => format!("host {}", host.chars().take(16).collect::<String>()),
            }
        }
    }

    /// File of the named or configured model, searched for once; `None` without a name.
    fn resolved(&mut self) -> Result<Option<Resolved>, Failure> {
        let cx = self.cx;
        let Some(named) = self
            .model
            .clone()
            .or_else(|| cx.config.model.default.clone())
        else {
            return Ok(None);
        };
        let found = self
            .resolved
            .get_or_insert_with(|| resolve(&cx.global, &named));
        found.clone().map(Some)
    }

    /// Service on this machine that would give the same answers as this process.
    fn running_service(&mut self) -> Option<AskedService> {
        self.left_out = None;
        let args = self.args;
        // A service has its own hosts and settings, which these arguments would override.
        let own_way = args.no_service
            || args.local
            || !args.shard.is_empty()
            || args.no_fallback
            || args.private != PrivateArgs::default();
        let own_settings = self.cx.global.set.iter().any(|s| !s.starts_with("policy."));
        if own_way || own_settings {
            return None;
        }
        let dir = self.cx.global.dir().ok()?;
        // Without a named model, any model of the service will do.
        let wanted = self.resolved().ok()?;
        let finding = find_service(&dir, wanted.as_ref());
        let service = match self.runtime.block_on(finding) {
            Found::Service(service) => service,
            Found::Nothing => return None,
            Found::Silent(dir) => {
                let process = Process::of(&dir);
                let hint = process.hint().map(|hint| format!(" ({hint})"));
                let said = format!(
                    "the service on this machine, {process}, does not answer{}",
                    hint.unwrap_or_default()
                );
                note(format!("warning: {said}; continuing without it"));
                self.left_out = Some(said);
                return None;
            }
        };
        if service.model.replaced {
            let what = format!(
                "the service on this machine answers with an earlier file than the one now at {}",
                service.model.path.display()
            );
            if wanted.is_some() {
                note(format!(
                    "{what}; answering without it. Restart the service to use this file"
                ));
                return None;
            }
            note(format!(
                "warning: {what}. Restart the service to use this file"
            ));
        }
        if !args.json {
            note("asking the service that runs on this machine (--no-service avoids it)");
        }
        Some(service)
    }

    fn run(&mut self, started: Instant) -> Result<(), Failure> {
        let question = match self.args.lines {
            true => None,
            false => question(&self.args.question, self.args.json || self.args.frames)?,
        };
        if self.args.raw && question.is_none() {
            return Err(
                Failure::new(Kind::Config, "--raw needs a prompt on the command line")
                    .hint("a conversation uses the model's chat template"),
            );
        }
        self.service = self.running_service();
        if self.service.is_none() {
            let own = self.open();
            // Mentions the silent service in the error, since it could perhaps have answered.
            self.own = Some(own.map_err(|failure| match &self.left_out {
                Some(said) => failure.beside_hint(said),
                None => failure,
            })?);
        }
        let Some(question) = question else {
            return match self.args.lines {
                true => self.lines(),
                false => self.converse(),
            };
        };
        let prompt = if self.args.raw {
            Prompt::Text(question)
        } else {
            let mut messages = self.system();
            messages.push(ChatMessage::user(question));
            Prompt::Messages(messages)
        };
        self.turn(prompt, started).end.map(|_| ())
    }

    fn system(&self) -> Vec<ChatMessage> {
        let system = self.args.system.iter();
        system.map(ChatMessage::system).collect()
    }

    /// Name of the answering model.
    fn name(&self) -> &str {
        match (&self.service, &self.own) {
            (Some(service), _) => &service.model.id,
            (None, Some(own)) => &own.model.id,
            (None, None) => "nobody",
        }
    }

    /// Switches to another model; keeps the old one if that fails.
    fn change_model(&mut self, name: &str) -> Result<(), Failure> {
        let new: ModelRef = name.parse().map_err(|e| {
            failure!(BadRequest, "{e}").hint("`hearthnet model list` lists the models")
        })?;
        let before = (
            self.model.replace(new),
            self.resolved.take(),
            self.begun.take(),
        );
        self.service = self.running_service();
        if self.service.is_some() {
            return Ok(());
        }
        // Frees the old model first: this machine may not have memory for two.
        if let Some(own) = self.own.take() {
            drop(own.conversation);
            self.runtime.block_on(own.transient.end());
        }
        self.own = match self.open() {
            Ok(own) => Some(own),
            Err(failure) => {
                (self.model, self.resolved, self.begun) = before;
                self.service = self.running_service();
                if self.service.is_none() {
                    self.own = self.open().ok();
                }
                return Err(failure);
            }
        };
        Ok(())
    }

    /// Prepares this process to answer by itself, alone or over hosts.
    fn open(&mut self) -> Result<LocalBackend, Failure> {
        let (args, cx, runtime) = (self.args, self.cx, self.runtime);
        let config = &cx.config;
        if !args.local && !config.policy.research.enable {
            return Err(ChatError::ExperimentalDisabled.into());
        }
        let home = match args.local || !args.shard.is_empty() {
            true => None,
            false => Some(community(cx)?),
        };
        // Check that the model is here before anything that takes time.
        let resolved = match &self.begun {
            Some(begun) => Some(begun.clone()),
            None => self.resolved()?,
        };
        // Discovers members while the model is read.
        let transient = match &home {
            Some(home) => self.unless_cancelled(TransientNode::begin(home, config))??,
            None => TransientNode::default(),
        };
        let mut model = match resolved {
            Some(resolved) => open_resolved(cx, resolved)?,
            None => {
                if home.is_some() {
                    runtime.block_on(transient.wait_until_synced());
                }
                // Alone, it needs no host: a model that is only served does not help.
                let alone = args.local.then(|| only_whole(&cx.global)).flatten();
                open_model(cx, alone.as_ref(), home.as_ref())?
            }
        };
        if let Some(home) = &home {
            self.unless_cancelled(transient.check_synced(home, || may_chat(home, config)))??;
        }
        let handle = runtime.handle();
        let (served, named) = if args.local {
            (local_model(&model, config)?, None)
        } else {
            private_layers::load(&mut model, args.private, 1, config)?;
            let fallback =
                config.research.distributed_inference.fallback_to_local && !args.no_fallback;
            match &home {
                Some(home) => {
                    let hosts = transient_hosts(&model, handle, &transient, home, config, fallback);
                    let served = hosted_model(&model, config, fallback, handle, hosts)?;
                    (served, None)
                }
                None => {
                    let key = Arc::new(cx.global.node_key()?);
                    let pool = pooled_hosts(handle, &args.shard, &key, &model, config);
                    let hosts = pool.clone();
                    let served = hosted_model(&model, config, fallback, handle, hosts)?;
                    (served, Some(pool))
                }
            }
        };
        let mut own = LocalBackend {
            model: served,
            named,
            home,
            transient,
            conversation: None,
        };
        match self.conversation(&own) {
            Ok(conversation) => {
                own.conversation = Some(conversation);
                Ok(own)
            }
            Err(failure) => {
                runtime.block_on(own.transient.end());
                // A revoked node reports the revocation first, with its remedy.
                let revoked = own.home.as_ref().and_then(|home| home.level().err());
                Err(revoked.unwrap_or(failure))
            }
        }
    }

    fn conversation(&self, own: &LocalBackend) -> Result<Conversation, Failure> {
        let connecting = (!self.args.local).then(|| Spinner::new(&self.style, "connecting"));
        let runtime = self.runtime.handle();
        let exact = match self.goes_on {
            true => Some(Exact::Require),
            false => self.args.exact,
        };
        let named = own.named.as_ref();
        let begun = converse(runtime, &own.model, named, exact, &self.cancel);
        drop(connecting);
        let (conversation, warnings) = begun?;
        warnings.iter().for_each(note);
        Ok(conversation)
    }

    /// Waits for a future that does not observe Ctrl-C.
    fn unless_cancelled<T>(&self, what: impl Future<Output = T>) -> Result<T, Failure> {
        let done = self.runtime.block_on(self.cancel.run_until_cancelled(what));
        done.ok_or_else(|| ChatError::Cancelled.into())
    }
}

/// Reads the schema of the answers.
fn json_schema(path: &Path) -> Result<Grammar, Failure> {
    let wrong = |why: String| {
        failure!(
            BadRequest,
            "cannot read the JSON schema {}: {why}",
            path.display()
        )
        .hint("--json-schema needs a file with a JSON schema, which is an object")
    };
    let mut text = String::new();
    // More than an accepted schema has, with white space.
    let most = 16 * MAX_GRAMMAR_BYTES as u64;
    let file = File::open(path).map_err(|error| wrong(error.to_string()))?;
    let read = file.take(most).read_to_string(&mut text);
    read.map_err(|error| wrong(error.to_string()))?;
    let schema = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    Ok(Grammar::JsonSchema(schema))
}

/// Finds the community of this node.
fn community(cx: &Context) -> Result<Home, Failure> {
    find_home(cx)?.ok_or_else(|| {
        Failure::from(ChatError::ShardUnavailable("no hosts are named, and this node is not in a community".into()))
            .hint("join one with `hearthnet community join CODE`, name each host with --shard ENDPOINT#NODEID, or answer on this machine alone with --local")
    })
}

/// Checks in the current log that this node may use its community's hosts.
fn may_chat(home: &Home, config: &Config) -> Result<(), Failure> {
    home.require_research(config)?;
    home.level().map(|_| ())
}
