//! A host that was replaced during an answer may still send results, for its old epoch or under the
//! number of another stream. If they were taken for results of the new host, they would change the
//! text. Late results are dropped and counted, and the text stays byte-identical. The same session
//! carries another chat, whose stream number the host uses too.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use hearthnet_http::{Metrics, Part};
use hearthnet_orchestrator::chat::Conversation;
use hearthnet_orchestrator::error::ChatError;
use hearthnet_orchestrator::hosts::{Choice, HostSource, RoutedSpan, Search};
use hearthnet_transport::{Message, StepResult};
use parking_lot::Mutex;

use super::prelude::*;
use crate::puppet::{Layers, Puppet};

/// Position whose answer the host holds back, in the middle of the answer.
const AT: u32 = PROMPT + TOKENS / 2;
/// Stall timeout of the first chat. Long for a step of a tiny model on a loaded machine.
const STALLED: Duration = Duration::from_secs(5);
/// Time limit of any wait in this test.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Stream numbers that no caller has opened in this session.
const NEVER_OPENED: [u32; 3] = [0, 99, u32::MAX];
/// Late results for the step that the replaced stream owed. The caller cannot tell them from honest
/// ones.
const LATE: u64 = 1;
/// Counter of the caller's late results.
const COUNTER: &str = "hearthnet_transport_late_results_total{side=\"caller\"}";

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<()> {
    blocking(found, chats).await
}

/// Results that the late host holds back, and whether it has sent the false ones.
#[derive(Default)]
struct Held {
    /// Correct results of the first and of the second chat.
    answers: Vec<StepResult>,
    /// Whether the false results were sent to the first chat.
    lied: bool,
}

/// Routes to the late host, or to the honest host once the late one is excluded.
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

fn chats(runtime: &Handle, found: &mut Findings) -> Result<()> {
    let numbers = Metrics::install(Part::Caller)?;
    let mut fleet = Fleet::new(runtime.clone(), None)?;
    let (caller, key, honest_key) = (new_key()?, new_key()?, new_key()?);
    let late = key.id();

    let held = Arc::new(Mutex::new(Held::default()));
    let puppet = late_host(runtime, &fleet, &key, Arc::clone(&held))?;
    // The honest host takes over; it waits until the late results were processed.
    let seen = Arc::new(AtomicBool::new(false));
    let waits = Arc::clone(&seen);
    let tamper: Tamper = Box::new(move |_| wait_until(|| waits.load(Ordering::Relaxed)));
    let again = NodeKey::from_secret(&caller.secret());
    let hosts = fleet.hosts(again, vec![(honest_key, tamper)])?;
    let honest_link = hosts.links().first().cloned();
    let honest_link = honest_link.ok_or_else(|| HarnessError::attacker("no honest host"))?;
    let link = HostLink::connect(&puppet.addr, &caller, Config::default());
    let link = Arc::new(runtime.block_on(link)?);
    let expected = fleet.ask(0, vec![unchanged()])?.done;

    let choice = fleet.choice(caller.id());
    let source = || LateFirst {
        links: [Arc::clone(&link), Arc::clone(&honest_link)],
        late,
        choice: choice.clone(),
    };
    fleet.pump.health_timeout = STALLED;
    let mut first = Conversation::new(Box::new(fleet.backend(Box::new(source()))?));
    fleet.pump.health_timeout = TIMEOUT * 4;
    let mut second = Conversation::new(Box::new(fleet.backend(Box::new(source()))?));
    let before = counted(&numbers);
    let fleet = &fleet;
    let (first_done, second_done) = std::thread::scope(|scope| {
        let one = scope.spawn(|| fleet.answer(&mut first, PROMPT));
        // The second chat starts while the first one waits.
        wait_until(|| !held.lock().answers.is_empty());
        let two = scope.spawn(|| fleet.answer(&mut second, PROMPT));
        wait_until(|| held.lock().lied && counted(&numbers) >= before + LATE);
        seen.store(true, Ordering::Relaxed);
        (one.join(), two.join())
    });
    found.holds("the host has sent false results", "yes", held.lock().lied);
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
        found.check_or(format!("{what}: its text"), "byte-identical", same, || text);
    }
    let dropped = counted(&numbers) - before;
    let held = dropped >= LATE;
    let what = "counted late results";
    found.check(what, format!("at least {LATE}"), dropped, held);
    Ok(())
}

/// Host that computes correctly up to [`AT`] and holds that answer back. When the first chat closes
/// its stream, the host sends false rows for the owed step, followed by the correct answer of the
/// second chat.
fn late_host(
    runtime: &Handle,
    fleet: &Fleet,
    key: &NodeKey,
    held: Arc<Mutex<Held>>,
) -> Result<Puppet> {
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
    runtime.block_on(Puppet::start(key, Box::new(script)))
}

/// False results in place of the owed one, followed by the correct result of the other chat.
fn lies(owed: &StepResult, other: Option<&StepResult>) -> Vec<StepResult> {
    // fp16 ones.
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
        // Epoch 0, which is earlier than the first epoch of the stream.
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

/// Late results that this process has counted.
fn counted(numbers: &Metrics) -> u64 {
    let text = numbers.render();
    let line = text.lines().find_map(|line| line.strip_prefix(COUNTER));
    line.and_then(|count| count.trim().parse().ok())
        .unwrap_or(0)
}

/// Polls a condition for up to [`TIMEOUT`].
fn wait_until(so: impl Fn() -> bool) {
    let begin = Instant::now();
    while !so() && begin.elapsed() < TIMEOUT {
        sleep(Duration::from_millis(5));
    }
}
