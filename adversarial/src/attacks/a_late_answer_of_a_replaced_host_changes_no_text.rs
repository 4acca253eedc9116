//! A host that was replaced in the middle of an answer may still answer: for its old epoch, or under the
//! number of another stream. Its rows belong to a sequence that goes on elsewhere; taken for the answer of
//! the new host, they would change the text. Late answers are dropped and counted, and the text is the
//! same to the byte. The same session carries another chat, whose stream the host names as well.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use hearthnet_bus::{NodeId, NodeKey};
use hearthnet_http::{Metrics, Part};
use hearthnet_orchestrator::Cancel;
use hearthnet_orchestrator::chat::{Conversation, Frame};
use hearthnet_orchestrator::error::ChatError;
use hearthnet_orchestrator::hosts::{Choice, HostSource, RoutedSpan, Search};
use hearthnet_orchestrator::link::HostLink;
use hearthnet_testkit::Tamper;
use hearthnet_transport::{Config, Message, StepResult};
use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::bench::new_key;
use crate::fleet::{Fleet, PROMPT, TOKENS, question};
use crate::puppet::{Layers, RawPuppet, start_raw};
use crate::{Bench, Findings, HarnessError};

/// The position whose answer the host holds back: after some tokens.
const AT: u32 = PROMPT + TOKENS / 2;
/// How long the first chat waits for it. Long for a step of a tiny model on a loaded machine.
const STALLED: Duration = Duration::from_secs(5);
/// How long anything may take to come.
const PATIENCE: Duration = Duration::from_secs(30);
/// A stream that no caller has opened in this session.
const NEVER_OPENED: [u32; 3] = [0, 99, u32::MAX];
/// Late answers for the step that the replaced stream was owed: one could be honest.
const LATE: u64 = 1;
/// The numbers of what a node counts.
const COUNTER: &str = "hearthnet_transport_late_results_total{side=\"caller\"}";

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let (runtime, mut heard) = (Handle::current(), Findings::default());
    let chats = tokio::task::spawn_blocking(move || chats(&runtime, &mut heard).map(|()| heard));
    found.0.extend(chats.await??.0);
    Ok(())
}

/// What the late host holds back, and has said.
#[derive(Default)]
struct Held {
    /// Right answers, of the first chat and of the second.
    answers: Vec<StepResult>,
    /// Whether the first chat has been told lies.
    lied: bool,
}

/// The late host first, and the honest one for whoever may not ask it.
struct LateFirst {
    links: [Arc<HostLink>; 2],
    late: NodeId,
    choice: Choice,
}

impl HostSource for LateFirst {
    fn route(&mut self, search: &Search<'_>) -> Result<Vec<RoutedSpan>, ChatError> {
        let [first, all @ ..] = &self.links;
        let links = match search.exclude.contains(&self.late) {
            true => all,
            false => std::slice::from_ref(first),
        };
        self.choice.among(links, search)
    }

    fn choice(&self) -> &Choice {
        &self.choice
    }
}

fn chats(runtime: &Handle, found: &mut Findings) -> Result<(), HarnessError> {
    let numbers = Metrics::install(Part::Caller)?;
    let mut fleet = Fleet::new(runtime.clone(), None)?;
    let (caller, key, honest_key) = (new_key()?, new_key()?, new_key()?);
    let late = key.id();

    let held = Arc::new(Mutex::new(Held::default()));
    let puppet = late_host(runtime, &fleet, &key, Arc::clone(&held))?;
    // The honest host takes over, and waits with it until the late answers have been seen to.
    let seen = Arc::new(AtomicBool::new(false));
    let waits = Arc::clone(&seen);
    let tamper: Tamper = Box::new(move |_| wait_until(|| waits.load(Ordering::Relaxed)));
    let again = NodeKey::from_secret(&caller.secret());
    let hosts = fleet.hosts(again, vec![(honest_key, tamper)])?;
    let honest_link = hosts.links().first().cloned();
    let honest_link = honest_link.ok_or_else(|| HarnessError::attacker("no honest host"))?;
    let link = HostLink::connect(&puppet.addr, &caller, Config::default());
    let link = Arc::new(runtime.block_on(link)?);
    let expected = {
        let untouched = fleet.hosts(new_key()?, vec![(new_key()?, Box::new(|_| {}))])?;
        fleet.ask_over(&untouched, 0, TOKENS)?.done
    };

    let choice = fleet.choice(caller.id());
    let source = || LateFirst {
        links: [Arc::clone(&link), Arc::clone(&honest_link)],
        late,
        choice: choice.clone(),
    };
    fleet.pump.health_timeout = STALLED;
    let mut first = Conversation::new(Box::new(fleet.backend(Box::new(source()))?));
    fleet.pump.health_timeout = PATIENCE * 4;
    let mut second = Conversation::new(Box::new(fleet.backend(Box::new(source()))?));
    let before = counted(&numbers);
    let fleet = &fleet;
    let ask = |conversation: &mut Conversation| {
        let (request, cancel) = (question(PROMPT, TOKENS), Cancel::default());
        let (now, mut hear) = (Instant::now(), |_: &Frame| {});
        conversation.answer(&fleet.text, &request, now, &cancel, &mut hear)
    };
    let (first_done, second_done) = std::thread::scope(|scope| {
        let one = scope.spawn(|| ask(&mut first));
        // The second chat is asked while the first one waits.
        wait_until(|| !held.lock().answers.is_empty());
        let two = scope.spawn(|| ask(&mut second));
        wait_until(|| held.lock().lied && counted(&numbers) >= before + LATE);
        seen.store(true, Ordering::Relaxed);
        (one.join(), two.join())
    });
    found.holds("the host has lied", "yes", held.lock().lied);
    for (what, done) in [
        ("the replaced chat", first_done),
        ("the other chat", second_done),
    ] {
        let panicked = |_| HarnessError::attacker("a chat panicked");
        let done = done.map_err(panicked)?;
        let (text, ids) = done.map_or_else(
            |error| (error.to_string(), Vec::new()),
            |done| (done.text, done.token_ids),
        );
        let same = (&text, &ids) == (&expected.text, &expected.token_ids);
        found.check_or(
            format!("{what}: its text"),
            "the same to the byte",
            same,
            || text,
        );
    }
    let dropped = counted(&numbers) - before;
    let held = dropped >= LATE;
    found.check(
        "late answers that are counted",
        format!("at least {LATE}"),
        dropped,
        held,
    );
    Ok(())
}

/// A host that computes honestly up to [`AT`], and holds that answer back. When the first chat closes its
/// stream, it sends wrong rows for the step that it owed, and the second chat's right answer behind them.
fn late_host(
    runtime: &Handle,
    fleet: &Fleet,
    key: &NodeKey,
    held: Arc<Mutex<Held>>,
) -> Result<RawPuppet, HarnessError> {
    let mut layers = Layers::load(fleet.file(), fleet.descriptor(key.id()))?;
    let script = move |message: Message| {
        let mut held = held.lock();
        let closed = match &message {
            Message::StreamClose(close) => Some(close.stream),
            _ => None,
        };
        let answer = layers.answer(message).ok().flatten();
        if let Some(Message::StepResult(result)) = &answer
            && result.position == AT
            && !held.lied
        {
            held.answers.push(result.clone());
            return Vec::new();
        }
        let mut answers: Vec<Message> = answer.into_iter().collect();
        let Some(owed) = held.answers.first().cloned() else {
            return answers;
        };
        if closed != Some(owed.stream) || held.lied {
            return answers;
        }
        held.lied = true;
        let lies = lies(&owed, held.answers.get(1));
        answers.extend(lies.into_iter().map(Message::StepResult));
        answers
    };
    runtime.block_on(start_raw(key, Box::new(script)))
}

/// What it says instead of the answer that it owed, and then the other chat's own answer.
fn lies(owed: &StepResult, other: Option<&StepResult>) -> Vec<StepResult> {
    // Rows of ones, in fp16.
    let ones = |result: &StepResult| StepResult {
        data: [0x00, 0x3c].repeat(result.data.len() / 2).into(),
        ..result.clone()
    };
    let wrong = ones(owed);
    let mut all = vec![
        wrong.clone(),
        wrong.clone(),
        StepResult {
            epoch: owed.epoch.wrapping_add(1),
            ..wrong.clone()
        },
        StepResult {
            position: owed.position + 1,
            ..wrong.clone()
        },
    ];
    if let Some(other) = other {
        // An earlier epoch than that of the stream, which is the first.
        let stale = StepResult {
            stream: other.stream,
            epoch: other.epoch.saturating_sub(1),
            ..wrong.clone()
        };
        all.extend([stale, other.clone()]);
    }
    all.extend(NEVER_OPENED.map(|stream| StepResult {
        stream,
        ..wrong.clone()
    }));
    all
}

/// Late answers that this process has counted.
fn counted(numbers: &Metrics) -> u64 {
    let text = numbers.render();
    let line = text.lines().find_map(|line| line.strip_prefix(COUNTER));
    line.and_then(|count| count.trim().parse().ok())
        .unwrap_or(0)
}

/// Asks again and again, for [`PATIENCE`] at most.
fn wait_until(so: impl Fn() -> bool) {
    let begin = Instant::now();
    while !so() && begin.elapsed() < PATIENCE {
        sleep(Duration::from_millis(5));
    }
}
