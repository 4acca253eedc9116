//! Memory for keys and values: who gets it, and who has to give it back.

use crate::fake::{KV_BYTES, PAGE};
use crate::fault::StreamFault;
use crate::plan::IDLE_AFTER;

use super::*;

/// A host with so many pages, of which each caller may hold so many per cent.
fn host_with(pages: u32, percent: u32) -> Host {
    Host::with_limits(|limits| {
        limits.kv_budget = u64::from(pages * PAGE) * KV_BYTES;
        limits.kv_share = percent;
    })
}

fn open_for(stream: u32, epoch: u32, positions: u32) -> Message {
    open_with(stream, epoch, |o| o.max_positions = positions)
}

/// Brings a stream to so many pages.
fn fill(caller: &mut Caller, host: &mut Host, stream: u32, pages: u32) {
    let answers = caller.ask(host, Message::Step(step(stream, 0, &rows(pages * PAGE))));
    assert_eq!(result(&answers).rows, pages * PAGE);
}

/// One more row at the end of so many pages.
fn next(stream: u32, pages: u32) -> Message {
    Message::Step(step(stream, pages * PAGE, &rows(1)))
}

fn error_of(answers: &[Message]) -> (u32, &str) {
    match answers {
        [Message::StreamError(e)] => (e.stream, e.code.as_str()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_could_never_fit_is_refused_at_the_open() {
    let mut host = host_with(10, 50);
    let mut caller = host.caller(1);
    let open = |epoch, pages| open_for(1, epoch, pages * PAGE);
    assert_eq!(caller.refusal(&mut host, open(1, 11)), "kv_too_small");
    assert_eq!(caller.refusal(&mut host, open(2, 6)), "kv_too_small");
    assert_eq!(caller.ask(&mut host, open(3, 5)), [opened(1, 3)]);
}

#[test]
fn streams_may_be_promised_more_than_there_is_and_take_only_what_they_fill() {
    let mut host = host_with(4, 100);
    let mut caller = host.caller(1);
    let stats = host.stats();
    assert_eq!((stats.kv_pages_used, stats.kv_pages_left), (0, 4));
    for stream in 1..=3 {
        assert_eq!(
            caller.ask(&mut host, open_for(stream, 1, 4 * PAGE)),
            [opened(stream, 1)]
        );
        caller.ask(&mut host, Message::Step(step(stream, 0, &rows(1))));
    }
    let stats = host.stats();
    assert_eq!((stats.kv_pages_used, stats.kv_pages_left), (3, 1));
    caller.tell(close(1, 1));
    host.run();
    assert_eq!(host.stats().kv_pages_left, 2);
}

#[test]
fn no_stream_begins_where_no_page_is_left() {
    let mut host = host_with(3, 100);
    let mut caller = host.caller(1);
    caller.tell(open_for(1, 1, 3 * PAGE));
    caller.tell(open_for(2, 1, PAGE));
    host.run();
    caller.outlet.take();
    fill(&mut caller, &mut host, 1, 2);
    // The second has not begun, and will take the last page.
    assert_eq!(caller.refusal(&mut host, open_for(3, 1, PAGE)), "kv_full");
    // Another caller has a right to half of it.
    let mut other = host.caller(2);
    assert_eq!(other.ask(&mut host, open_for(1, 1, PAGE)), [opened(1, 1)]);
}

#[test]
fn the_least_progressed_stream_gives_way_and_the_others_do_not_notice() {
    let mut host = host_with(4, 100);
    let mut caller = host.caller(1);
    for stream in 1..=3 {
        caller.ask(&mut host, open_for(stream, 1, 4 * PAGE));
    }
    fill(&mut caller, &mut host, 2, 1);
    fill(&mut caller, &mut host, 1, 2);
    caller.ask(&mut host, Message::Step(step(3, 0, &rows(3))));
    caller.tell(next(1, 2));
    caller.tell(next(2, 1));
    host.run();
    let answers = caller.outlet.take();
    let [Message::StreamError(error), rest @ ..] = &answers[..] else {
        panic!("{answers:?}")
    };
    assert_eq!((error.stream, error.code.as_str()), (3, "preempted"));
    // One page for two streams that each need one: the less progressed one goes as well.
    let codes: Vec<u32> = rest
        .iter()
        .map(|answer| match answer {
            Message::StepResult(r) => {
                assert_eq!(r.data, encode(&expected(31.0, 32, &rows(1))));
                r.stream
            }
            Message::StreamError(e) => 100 + e.stream,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(codes, [102, 1]);
    let stats = host.stats();
    assert_eq!((stats.preempted, stats.streams), (2, 1));
    assert_eq!((stats.kv_pages_used, stats.kv_pages_left), (3, 1));
    assert_eq!(host.errors("preempted"), 2);
}

#[test]
fn a_preempted_stream_comes_back_and_is_answered_as_if_nothing_had_been() {
    let mut host = host_with(3, 100);
    let (mut a, mut b) = (host.caller(1), host.caller(2));
    a.ask(&mut host, open_for(1, 1, 3 * PAGE));
    b.ask(&mut host, open_for(1, 1, 3 * PAGE));
    fill(&mut a, &mut host, 1, 2);
    fill(&mut b, &mut host, 1, 1);
    // Both need a page. Half of three is one: both hold more, or would.
    let answers = b.ask(&mut host, next(1, 1));
    assert_eq!(error_of(&answers), (1, "preempted"));
    // Where one is left, it is let in again; the other goes on, and ends.
    assert_eq!(b.ask(&mut host, open_for(1, 2, 3 * PAGE)), [opened(1, 2)]);
    assert_eq!(result(&a.ask(&mut host, next(1, 2))).rows, 1);
    assert_eq!(a.ask(&mut host, close(1, 1)), []);
    let again = Step {
        epoch: 2,
        ..step(1, 0, &rows(PAGE + 1))
    };
    let answers = b.ask(&mut host, Message::Step(again));
    assert_eq!(
        result(&answers).data,
        encode(&expected(0.0, 0, &rows(PAGE + 1)))
    );
}

#[test]
fn a_conversation_that_is_kept_gives_way_before_any_that_runs() {
    let mut host = host_with(4, 100);
    let (mut a, mut b) = (host.caller(1), host.caller(2));
    a.ask(&mut host, open_for(1, 1, 4 * PAGE));
    fill(&mut a, &mut host, 1, 3);
    host.clock.advance(IDLE_AFTER);
    b.ask(&mut host, open_for(1, 1, 4 * PAGE));
    fill(&mut b, &mut host, 1, 1);
    assert_eq!(host.stats().preempted, 0, "there was a page");
    let answers = b.ask(&mut host, next(1, 1));
    assert_eq!(result(&answers).rows, 1);
    let answers = a.outlet.take();
    assert_eq!(error_of(&answers), (1, "preempted"));
    assert_eq!(host.stats().preempted, 1);
}

#[test]
fn pages_that_somebody_sits_on_are_given_to_those_who_compute() {
    // One caller fills all pages, with as many streams as it may have but one, and keeps them busy.
    let mut host = host_with(8, 100);
    let (mut hog, mut other) = (host.caller(1), host.caller(2));
    for (stream, pages) in [(1, 5), (2, 3)] {
        hog.ask(&mut host, open_for(stream, 1, 8 * PAGE));
        fill(&mut hog, &mut host, stream, pages);
    }
    assert_eq!(
        other.ask(&mut host, open_for(1, 1, 8 * PAGE)),
        [opened(1, 1)]
    );
    // Its half is four pages; the hog loses what it needs to, and no more.
    for position in 0..4 * PAGE {
        let one = Message::Step(step(1, position, &rows(1)));
        assert_eq!(result(&other.ask(&mut host, one)).rows, 1);
        if position % PAGE == 0 {
            hog.tell(Message::Step(step(1, 5 * PAGE - 1, &rows(1))));
            host.run();
        }
    }
    let lost: Vec<_> = hog
        .outlet
        .take()
        .into_iter()
        .filter_map(|answer| match answer {
            Message::StreamError(e) => Some((e.stream, e.code)),
            _ => None,
        })
        .collect();
    let preempted = |stream| (stream, Code::PREEMPTED);
    assert_eq!(lost[..2], [preempted(2), preempted(1)]);
    assert!(lost[2..].iter().all(|(_, code)| *code == "stream_ended"));
    // Beyond its half it has no right to anything, but now there is room.
    assert_eq!(result(&other.ask(&mut host, next(1, 4))).rows, 1);
}

#[test]
fn opening_and_closing_again_and_again_takes_nothing_from_anybody() {
    let mut host = host_with(4, 100);
    let (mut churner, mut other) = (host.caller(1), host.caller(2));
    other.ask(&mut host, open_for(1, 1, 4 * PAGE));
    fill(&mut other, &mut host, 1, 2);
    for epoch in 1..=50 {
        churner.tell(open_for(1, epoch, 2 * PAGE));
        churner.tell(Message::Step(Step {
            epoch,
            ..step(1, 0, &rows(2 * PAGE))
        }));
        host.run();
        if epoch % 2 == 0 {
            churner.tell(close(1, epoch));
        }
    }
    assert_eq!(result(&other.ask(&mut host, next(1, 2))).rows, 1);
    assert_eq!(other.ask(&mut host, close(1, 1)), []);
    drop(churner);
    host.run();
    host.assert_empty();
}

#[test]
fn a_caller_may_not_pile_up_steps_over_its_streams_and_sessions() {
    let mut host = Host::new();
    let (mut a, mut b) = (host.caller(1), host.caller(1));
    let mut other = host.caller(2);
    a.open(&mut host, 1);
    b.open(&mut host, 1);
    other.open(&mut host, 1);
    for position in 0..WAITING {
        a.tell(Message::Step(step(1, position, &rows(1))));
        b.tell(Message::Step(step(1, position, &rows(1))));
    }
    a.tell(close(1, 1));
    // What its compute thread has not dropped yet counts.
    a.tell(open(1, 2));
    let again = Step {
        epoch: 2,
        ..step(1, 0, &rows(1))
    };
    assert_eq!(a.refusal_now(Message::Step(again)), "step_quota");
    other.tell(Message::Step(step(1, 0, &rows(1))));
    host.run();
    assert_eq!(result(&other.outlet.take()).rows, 1);
    assert_eq!(b.outlet.take().len(), WAITING as usize);
    drop((a, b, other));
    host.run();
    host.assert_empty();
}

/// A caller that answers `preempted` and `kv_full` as it should: it comes back later, each time
/// later, opens a new life, and replays.
struct Patient {
    caller: Caller,
    rows: Vec<[f32; 4]>,
    epoch: u32,
    held: u32,
    known: u32,
    out: Vec<[f32; 4]>,
    until: u32,
    tries: u32,
}

impl Patient {
    fn is_over(&self) -> bool {
        self.known == self.rows.len() as u32
    }

    /// Takes what came, and asks for the next row or chunk.
    fn go(&mut self, round: u32) {
        for answer in self.caller.outlet.take() {
            match answer {
                Message::StreamOpened(_) => {}
                Message::StepResult(r) if r.epoch == self.epoch => {
                    self.held = r.position + r.rows;
                    let mut values = Vec::new();
                    BoundaryDtype::F16.decode(&r.data, &mut values).unwrap();
                    let (rows, _) = values.as_chunks::<4>();
                    self.out.truncate(r.position as usize);
                    self.out.extend_from_slice(rows);
                    if self.held > self.known {
                        (self.known, self.tries) = (self.held, 0);
                    }
                }
                Message::StepResult(_) => {}
                Message::StreamError(e) => {
                    assert!(
                        ["preempted", "kv_full", "stream_ended", "stream_limit"]
                            .contains(&e.code.as_str()),
                        "{e:?}"
                    );
                    if e.epoch == self.epoch && self.until <= round {
                        self.until = round + (1 << self.tries.min(16));
                        (self.tries, self.epoch) = (self.tries + 1, self.epoch + 1);
                        self.held = u32::MAX;
                    }
                }
                other => panic!("{other:?}"),
            }
        }
        if self.is_over() {
            self.caller.tell(close(1, self.epoch));
            return;
        }
        if self.until > round {
            return;
        }
        if self.held == u32::MAX {
            let most = self.rows.len() as u32;
            self.caller.tell(open_for(1, self.epoch, most));
            self.held = 0;
        }
        let count = (self.known - self.held).clamp(1, 20) as usize;
        let from = self.held as usize;
        self.caller.tell(Message::Step(Step {
            epoch: self.epoch,
            ..step(1, self.held, &self.rows[from..from + count])
        }));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Through the stream table and the scheduler: whoever has to share too little memory still gets, row
    /// for row, what it would have got alone.
    #[test]
    fn whoever_is_preempted_ends_with_the_same_rows(
        pages in 4u32..9,
        lengths in proptest::collection::vec((1u8..4, 20u32..64), 2..4),
    ) {
        let mut host = host_with(pages, 100);
        let budget = u64::from(pages * PAGE) * KV_BYTES;
        let mut callers: Vec<_> = lengths
            .iter()
            .map(|&(peer, length)| Patient {
                caller: host.caller(peer),
                rows: rows(length),
                epoch: 1,
                held: u32::MAX,
                known: 0,
                out: Vec::new(),
                until: 0,
                tries: 0,
            })
            .collect();
        for round in 1.. {
            prop_assert!(round < 20_000, "nobody gets on");
            for patient in &mut callers {
                if !patient.is_over() {
                    patient.go(round);
                }
            }
            host.run();
            prop_assert!(host.probe.kv_bytes.load(Ordering::SeqCst) <= budget);
            if callers.iter().all(Patient::is_over) {
                break;
            }
        }
        for patient in &callers {
            prop_assert_eq!(&patient.out, &expected(0.0, 0, &patient.rows));
        }
        drop(callers);
        host.run();
        host.assert_empty();
    }
}

#[test]
fn what_rests_gives_its_pages_at_once() {
    let mut host = host_with(4, 100);
    let (mut a, mut b) = (host.caller(1), host.caller(2));
    a.ask(&mut host, open_for(1, 1, 4 * PAGE));
    fill(&mut a, &mut host, 1, 4);
    assert_eq!(a.ask(&mut host, truncate(1, 4 * PAGE)), []);
    b.ask(&mut host, open_for(1, 1, 4 * PAGE));
    fill(&mut b, &mut host, 1, 1);
    assert_eq!(error_of(&a.outlet.take()), (1, "preempted"));
}

#[test]
fn a_stream_that_is_asked_for_little_is_admitted_whatever_the_model_could_read() {
    // The model reads far more than the memory holds.
    let mut host = host_with(4, 100);
    const { assert!(POSITIONS > 4 * PAGE) };
    let mut caller = host.caller(1);
    let whole = open_for(1, 1, POSITIONS);
    assert_eq!(caller.refusal(&mut host, whole), "kv_too_small");
    assert_eq!(caller.ask(&mut host, open_for(1, 2, PAGE)), [opened(1, 2)]);
}

#[test]
fn a_stream_that_is_opened_again_for_more_grows() {
    let mut host = host_with(4, 100);
    let mut caller = host.caller(1);
    caller.ask(&mut host, open_for(1, 1, PAGE));
    fill(&mut caller, &mut host, 1, 1);
    assert_eq!(
        caller.ask(&mut host, open_for(1, 1, 2 * PAGE)),
        [opened(1, 1)]
    );
    let grown = caller.ask(&mut host, next(1, 1));
    assert_eq!(result(&grown).data, encode(&expected(15.0, PAGE, &rows(1))));
    // Less, or as much, is no growth; more than could ever be there ends it.
    assert_eq!(caller.refusal_now(open_for(1, 1, PAGE)), "stale_epoch");
    assert_eq!(host.stats().streams, 1);
    let beyond = open_for(1, 1, 5 * PAGE);
    assert_eq!(caller.refusal(&mut host, beyond), "kv_too_small");
    host.assert_empty();
}

#[test]
fn growth_beyond_what_the_host_allows_ends_the_stream_with_a_word() {
    let mut host = Host::new();
    let mut caller = host.caller(1);
    caller.open(&mut host, 1);
    let beyond = open_for(1, 1, POSITIONS + 1);
    assert_eq!(caller.refusal(&mut host, beyond), "context_full");
    host.assert_empty();
}

#[test]
fn a_caller_learns_why_a_stream_ended_before_it_hears_that_it_has() {
    let mut host = Host::new();
    let mut caller = host.caller(1);
    caller.open(&mut host, 1);
    let handle = caller.stream_table.handle_of(1);
    let begun = std::sync::Barrier::new(2);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            handle.end(|| {
                begun.wait();
                // The step below arrives now, if it ever does.
                for _ in 0..1000 {
                    std::thread::yield_now();
                }
                let error = StreamFault::Preempted.message(handle.name, None);
                handle.outlet.send(Message::StreamError(error));
            })
        });
        begun.wait();
        caller.tell(Message::Step(step(1, 0, &rows(1))));
    });
    let answers = caller.outlet.take();
    let [Message::StreamError(first), Message::StreamError(second)] = &answers[..] else {
        panic!("{answers:?}")
    };
    assert_eq!(first.code, "preempted");
    assert_eq!(second.code, "stream_ended");
}
