//! Several chats at once over the same hosts: real model, real processes, one session with each
//! host for all chats. Each answer is the same as alone.

use std::panic::resume_unwind;

use hearthnet_http::{Metrics, Part};
use hearthnet_orchestrator::chat::{ChatRequest, Conversation};
use hearthnet_orchestrator::sharded::PumpSettings;
use parking_lot::{Mutex, RwLock};
use rustix::process::Signal;

use crate::support::caller::{Caller, Heard, request};
use crate::support::gauges::Gauges;
use crate::support::*;

const QUESTIONS: [&str; 3] = [
    "Tell me a short story about a lighthouse keeper and a lost whale.",
    "What is bread made of?",
    "Name three colours, and say why you like them.",
];

fn questions(count: usize) -> Vec<ChatRequest> {
    let asked = QUESTIONS.iter().zip(1..).take(count);
    asked.map(|(text, seed)| request(text, seed)).collect()
}

/// Caller with the default health timeout, because no host stops here.
fn caller(context: u32) -> Caller {
    Caller::new(context, PumpSettings::default().health_timeout)
}

/// Asks all questions at once, each in a thread of its own, and compares every answer with that of
/// this machine alone. `at` is called for every token of every chat, as [`Caller::answer`]
/// describes.
fn together(
    caller: &Caller,
    hosts: &[&Host],
    chats: &[ChatRequest],
    fallback: bool,
    at: impl Fn(usize, u32, &[String]) + Sync,
) -> Vec<Heard> {
    let expected: Vec<_> = chats.iter().map(|chat| caller.alone(chat)).collect();
    let addresses = hosts.iter().map(|host| host.address.clone());
    let links = caller.connect(&addresses.collect::<Vec<_>>());
    // Opened before the chats grow: a later chat could be refused for lack of memory.
    let open = |_: &ChatRequest| caller.open(&links, fallback);
    let conversations: Vec<_> = chats.iter().map(open).collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> = std::iter::zip(chats, &expected)
            .zip(conversations)
            .enumerate()
            .map(|(index, ((chat, expected), mut conversation))| {
                let at = &at;
                scope.spawn(move || {
                    let at = |token: u32, who: &[String]| at(index, token, who);
                    let what = format!("chat {index}");
                    caller
                        .same_answer(&mut conversation, chat, expected, &what, at)
                        .1
                })
            })
            .collect();
        let ends = threads.into_iter().map(|thread| thread.join());
        // The chat's thread has already printed its panic.
        ends.map(|end| end.unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    })
}

/// Three hosts with overlapping ranges; a chat needs all of them.
const RANGES: [&str; 3] = ["0-11", "8-21", "18-29"];

#[test]
fn two_chats_over_three_hosts_give_the_same_answers_as_alone() {
    let caller = caller(u32::MAX);
    let hosts = RANGES.map(|range| caller.host(range, &[]));
    let all = hosts.each_ref();
    let heard = together(&caller, &all, &questions(2), false, |_, _, route| {
        assert_eq!(route.len(), 3);
    });
    assert!(heard.iter().all(|heard| heard.degraded.is_empty()));
}

/// Kills the host of the middle layers once both chats have reached their tenth token.
struct Killer<'a> {
    hosts: &'a [&'a Host],
    ready: Mutex<[bool; 2]>,
}

impl Killer<'_> {
    fn at(&self, chat: usize, token: u32, route: &[String]) {
        let mut ready = self.ready.lock();
        if token != 10 || ready[chat] {
            return;
        }
        ready[chat] = true;
        if *ready == [true; 2] {
            let mut hosts = self.hosts.iter();
            let middle = hosts.find(|host| host.address.ends_with(&route[1]));
            let middle = middle.expect("one of these hosts");
            middle.signal(Signal::KILL);
            wait_for_end(middle.process.child.id());
        }
    }
}

/// Runs two chats at once and kills the middle host under both. Returns their events.
fn without_the_middle(caller: &Caller, hosts: &[&Host], fallback: bool) -> Vec<Heard> {
    let killer = Killer {
        hosts,
        ready: Mutex::default(),
    };
    let at = |chat, token, route: &[String]| killer.at(chat, token, route);
    let heard = together(caller, hosts, &questions(2), fallback, at);
    assert_eq!(killer.ready.into_inner(), [true; 2]);
    heard
}

#[test]
fn the_middle_host_dies_under_two_chats_and_another_goes_on_for_both() {
    let caller = caller(u32::MAX);
    let hosts = RANGES.map(|range| caller.host(range, &[]));
    let spare = caller.host(RANGES[1], &[]);
    let hosts: Vec<&Host> = hosts.iter().chain([&spare]).collect();
    let heard = without_the_middle(&caller, &hosts, false);
    assert!(heard.iter().any(|heard| heard.recoveries.len() == 1));
    assert!(heard.iter().all(|heard| !heard.local));
}

#[test]
fn the_middle_host_dies_under_two_chats_and_this_machine_goes_on_for_both() {
    let caller = caller(u32::MAX);
    let hosts = RANGES.map(|range| caller.host(range, &[]));
    let hosts = hosts.each_ref();
    let heard = without_the_middle(&caller, &hosts, true);
    assert!(heard.iter().any(|heard| heard.local));
}

/// Lock on the process-wide preemption counter: one test counts preemptions, others cause them. The
/// callers of `failover` cause none, because their hosts have memory and slots enough.
static GIVING_WAY: RwLock<()> = RwLock::new(());

#[test]
fn chats_beyond_the_hosts_memory_take_longer_and_give_the_same_answers() {
    let _alone = GIVING_WAY.write();
    // Five pages of 32 positions per host; each chat needs three in the end.
    let caller = caller(128);
    let numbers = Metrics::install(Part::Caller).expect("no other recorder");
    let memory = [
        "--set",
        "research.distributed_inference.host.kv_budget_mb=2",
    ];
    let settings = [&memory[..], &gauges::SHOWN].concat();
    let hosts = ["0-14", "15-29"].map(|range| caller.host(range, &settings));
    let all = hosts.each_ref();
    let heard = together(&caller, &all, &questions(3), false, |_, _, _| {});
    for heard in heard {
        assert!(heard.degraded.is_empty() && heard.recoveries.is_empty());
    }
    let heard = Gauges::of(numbers.render()).count("distributed_inference_preemptions_total");
    // Host counter of preemptions, which must equal its errors with the code `preempted`.
    let done = hosts.each_ref().map(|host| {
        let gauges = Gauges::at(&gauges::address(host));
        let ended = "hearthnet_shard_errors_total{code=\"preempted\"}";
        let (preempted, ended) = (
            gauges.value("hearthnet_shard_preempted_total"),
            gauges.value(ended),
        );
        assert_eq!(preempted.unwrap_or(0.0), ended.unwrap_or(0.0));
        preempted.unwrap_or(0.0) as u64
    });
    let done: u64 = done.iter().sum();
    // A stream that is being replaced may be preempted too; its caller does not count that.
    assert!(0 < heard && heard <= done, "{heard} heard, {done} done");
}

/// Stream limit of each host, low enough to be reached.
const TWO_PLACES: [&str; 2] = [
    "--set",
    "research.distributed_inference.host.max_concurrent_streams=2",
];

#[test]
fn idle_conversations_yield_their_slots_at_once_and_continue_later() {
    let _counted = GIVING_WAY.read();
    let caller = caller(u32::MAX);
    let hosts = ["0-14", "15-29"].map(|range| caller.host(range, &TWO_PLACES));
    let addresses: Vec<String> = hosts.iter().map(|host| host.address.clone()).collect();
    let links = caller.connect(&addresses);
    let chats = questions(3);
    let ask = |conversation: &mut Conversation, chat: &ChatRequest| {
        let alone = caller.alone(chat);
        let (_, heard) = caller.same_answer(conversation, chat, &alone, "a chat", |_, _| {});
        assert!(heard.degraded.is_empty() && heard.aborted.is_empty());
    };
    // The first two conversations take all stream slots; the third one makes an idle slot free.
    let mut kept: Vec<Conversation> = Vec::new();
    for chat in &chats {
        let mut conversation = caller.open(&links, false);
        ask(&mut conversation, chat);
        kept.push(conversation);
    }
    for (conversation, chat) in kept.iter_mut().zip(&chats) {
        ask(conversation, chat);
    }
}

#[test]
fn more_new_chats_than_slots_wait_and_are_all_answered() {
    let _counted = GIVING_WAY.read();
    let caller = caller(u32::MAX);
    let hosts = ["0-14", "15-29"].map(|range| caller.host(range, &TWO_PLACES));
    let addresses: Vec<String> = hosts.iter().map(|host| host.address.clone()).collect();
    let links = caller.connect(&addresses);
    let chats = [questions(3), questions(3)].concat();
    let expected: Vec<_> = chats.iter().map(|chat| caller.alone(chat)).collect();
    std::thread::scope(|scope| {
        for (chat, expected) in chats.iter().zip(&expected) {
            let (caller, links) = (&caller, &links);
            scope.spawn(move || {
                // Panics if it is refused.
                let mut conversation = caller.open(links, false);
                caller.same_answer(&mut conversation, chat, expected, "a chat", |_, _| {});
            });
        }
    });
}

#[test]
fn a_model_with_a_context_beyond_the_hosts_memory_is_served() {
    let _counted = GIVING_WAY.read();
    let caller = caller(u32::MAX);
    let memory = [
        "--set",
        "research.distributed_inference.host.kv_budget_mb=4",
    ];
    let hosts = ["0-14", "15-29"].map(|range| caller.host(range, &memory));
    let all = hosts.each_ref();
    let heard = together(&caller, &all, &questions(1), false, |_, _, _| {});
    assert!(heard[0].degraded.is_empty());
}
