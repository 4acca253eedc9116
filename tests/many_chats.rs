//! Several chats at once over the same hosts: real model, real processes, one session with each
//! host for all chats. Whatever they share, each says what it says alone.
#![allow(clippy::expect_used, clippy::panic, reason = "so a test fails")]

mod support;

#[path = "support/caller.rs"]
mod caller;

use std::panic::resume_unwind;

use caller::{Caller, Heard, request, same};
use hearthnet_http::{Metrics, Part};
use hearthnet_orchestrator::chat::{ChatRequest, Conversation};
use hearthnet_orchestrator::sharded::PumpSettings;
use parking_lot::{Mutex, RwLock};
use rustix::process::Signal;
use support::gauges::{self, Gauges};
use support::{Host, wait_for_end};

const QUESTIONS: [&str; 3] = [
    "Tell me a short story about a lighthouse keeper and a lost whale.",
    "What is bread made of?",
    "Name three colours, and say why you like them.",
];

fn questions(count: usize) -> Vec<ChatRequest> {
    let asked = QUESTIONS.iter().zip(1..).take(count);
    asked.map(|(text, seed)| request(text, seed)).collect()
}

/// A caller that gives its hosts as long as they need: none of them is ever stopped here.
fn caller(context: u32) -> Caller {
    Caller::new(context, PumpSettings::default().health_timeout)
}

/// Asks all at once, each in a thread of its own, and compares every answer with the one that
/// this machine alone gives. `at` hears every token of every chat, as [`Caller::answer`] says.
fn together(
    caller: &Caller,
    hosts: &[&Host],
    chats: &[ChatRequest],
    fallback: bool,
    at: impl Fn(usize, u32, &[String]) + Sync,
) -> Vec<Heard> {
    let expected: Vec<_> = chats.iter().map(|chat| caller.alone(chat)).collect();
    let addresses: Vec<String> = hosts.iter().map(|host| host.address.clone()).collect();
    let links = caller.connect(&addresses);
    // A chat that comes when the others have grown may find no room at all, and be refused.
    let open = |_: &ChatRequest| caller.open(&links, fallback);
    let conversations: Vec<_> = chats.iter().map(open).collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> = std::iter::zip(chats, &expected)
            .zip(conversations)
            .enumerate()
            .map(|(index, ((chat, expected), mut conversation))| {
                let at = &at;
                scope.spawn(move || {
                    let mut heard = Heard::default();
                    let result =
                        caller.answer(&mut conversation, chat, &mut heard, |token, who| {
                            at(index, token, who);
                        });
                    same(&result, &heard, expected, &format!("chat {index}"));
                    heard
                })
            })
            .collect();
        let ends = threads.into_iter().map(|thread| thread.join());
        // What a chat's thread has said of its panic is all that there is to say.
        ends.map(|end| end.unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    })
}

/// Three hosts whose ranges overlap, so that a chat needs all of them.
const RANGES: [&str; 3] = ["0-11", "8-21", "18-29"];

#[test]
fn two_chats_over_three_hosts_say_what_each_says_alone() {
    let caller = caller(u32::MAX);
    let hosts = RANGES.map(|range| caller.host(range, &[]));
    let heard = together(
        &caller,
        &hosts.each_ref(),
        &questions(2),
        false,
        |_, _, route| {
            assert_eq!(route.len(), 3);
        },
    );
    assert!(heard.iter().all(|heard| heard.degraded.is_empty()));
}

/// Kills the host that runs the middle once both chats have come to their tenth token.
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
            let middle = self
                .hosts
                .iter()
                .find(|host| host.address.ends_with(&route[1]));
            let middle = middle.expect("one of these hosts");
            middle.signal(Signal::KILL);
            wait_for_end(middle.process.child.id());
        }
    }
}

/// Two chats at once, and what they heard; the host in the middle is killed under both.
fn without_the_middle(caller: &Caller, hosts: &[&Host], fallback: bool) -> Vec<Heard> {
    let killer = Killer {
        hosts,
        ready: Mutex::default(),
    };
    let heard = together(
        caller,
        hosts,
        &questions(2),
        fallback,
        |chat, token, route| {
            killer.at(chat, token, route);
        },
    );
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

/// Streams give way in several of these tests, and one counts them: in the whole process.
static GIVING_WAY: RwLock<()> = RwLock::new(());

#[test]
fn chats_that_do_not_fit_into_their_hosts_memory_take_longer_and_say_the_same() {
    let _alone = GIVING_WAY.write();
    // Five pages of 32 positions per host, of which each chat needs three in the end.
    let caller = caller(128);
    let numbers = Metrics::install(Part::Caller).expect("nobody else counts");
    let memory = [
        "--set",
        "research.distributed_inference.host.kv_budget_mb=2",
    ];
    let settings = [&memory[..], &gauges::SHOWN].concat();
    let hosts = ["0-14", "15-29"].map(|range| caller.host(range, &settings));
    let heard = together(
        &caller,
        &hosts.each_ref(),
        &questions(3),
        false,
        |_, _, _| {},
    );
    for heard in heard {
        assert!(heard.degraded.is_empty() && heard.recoveries.is_empty());
    }
    let heard = Gauges::of(numbers.render()).count("distributed_inference_preemptions_total");
    // What a host says of itself, and under which name.
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
    // A stream that is being replaced may be preempted as well, and nobody listens to it any more.
    assert!(0 < heard && heard <= done, "{heard} heard, {done} done");
}

/// So few places on every host that they are soon taken.
const TWO_PLACES: [&str; 2] = [
    "--set",
    "research.distributed_inference.host.max_concurrent_streams=2",
];

#[test]
fn conversations_that_rest_make_room_for_another_at_once_and_go_on_later() {
    let _counted = GIVING_WAY.read();
    let caller = caller(u32::MAX);
    let hosts = ["0-14", "15-29"].map(|range| caller.host(range, &TWO_PLACES));
    let addresses: Vec<String> = hosts.iter().map(|host| host.address.clone()).collect();
    let links = caller.connect(&addresses);
    let chats = questions(3);
    let ask = |conversation: &mut Conversation, chat: &ChatRequest| {
        let mut heard = Heard::default();
        let result = caller.answer(conversation, chat, &mut heard, |_, _| {});
        same(&result, &heard, &caller.alone(chat), "a chat");
        assert!(heard.degraded.is_empty() && heard.aborted.is_empty());
    };
    // All places are taken by the first two; nothing but the third one's coming frees any.
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
fn more_new_chats_than_places_wait_and_are_all_answered() {
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
                // It panics where it is refused.
                let mut conversation = caller.open(links, false);
                let mut heard = Heard::default();
                let result = caller.answer(&mut conversation, chat, &mut heard, |_, _| {});
                same(&result, &heard, expected, "a chat");
            });
        }
    });
}

#[test]
fn a_model_that_reads_far_more_than_its_hosts_memory_holds_is_served_all_the_same() {
    let _counted = GIVING_WAY.read();
    let caller = caller(u32::MAX);
    let memory = [
        "--set",
        "research.distributed_inference.host.kv_budget_mb=4",
    ];
    let hosts = ["0-14", "15-29"].map(|range| caller.host(range, &memory));
    let heard = together(
        &caller,
        &hosts.each_ref(),
        &questions(1),
        false,
        |_, _, _| {},
    );
    assert!(heard[0].degraded.is_empty());
}
