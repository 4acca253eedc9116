//! KV pages: allocation and preemption.

use hearthnet_files::BoundaryDtype;

use crate::fault::StreamFault;
use crate::plan::IDLE_AFTER;
use crate::tests::fake::{KV_BYTES, PAGE};

use super::*;

/// A host with `pages` pages, of which each caller may hold `percent` per cent.
fn host_with(pages: u32, percent: u32) -> Host {
    Host::with_config(|config| {
        config.kv_budget_bytes = u64::from(pages * PAGE) * KV_BYTES;
        config.kv_share_per_caller = percent;
    })
}

fn open_up_to(stream: u32, epoch: u32, positions: u32) -> Message {
    open_with(stream, epoch, |o| o.max_positions = positions)
}

/// Fills a stream up to `pages` pages.
fn fill(caller: &mut Caller, host: &mut Host, stream: u32, pages: u32) {
    let answers = caller.ask(host, step(stream, 0, &rows(pages * PAGE)));
    assert_eq!(result(&answers).rows, pages * PAGE);
}

/// A step of one row after `pages` full pages.
fn next(stream: u32, pages: u32) -> Message {
    step(stream, pages * PAGE, &rows(1))
}

fn error_of(answers: &[Message]) -> (u32, &str) {
    match answers {
        [Message::StreamError(e)] => (e.stream, e.code.as_str()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_stream_larger_than_the_kv_budget_is_refused_at_the_open() {
    let mut host = host_with(10, 50);
    let mut caller = host.caller(1);
    let open = |epoch, pages| open_up_to(1, epoch, pages * PAGE);
    assert_eq!(caller.refusal(&mut host, open(1, 11)), "kv_too_small");
    assert_eq!(caller.refusal(&mut host, open(2, 6)), "kv_too_small");
    assert_eq!(caller.ask(&mut host, open(3, 5)), [opened(1, 3)]);
}

#[test]
fn kv_is_overcommitted_and_allocated_by_use() {
    let mut host = host_with(4, 100);
    let mut caller = host.caller(1);
    let stats = host.stats();
    assert_eq!((stats.kv_pages_used, stats.kv_pages_left), (0, 4));
    for stream in 1..=3 {
        assert_eq!(
            caller.ask(&mut host, open_up_to(stream, 1, 4 * PAGE)),
            [opened(stream, 1)]
        );
        caller.ask(&mut host, step(stream, 0, &rows(1)));
    }
    let stats = host.stats();
    assert_eq!((stats.kv_pages_used, stats.kv_pages_left), (3, 1));
    caller.tell(close(1, 1));
    host.run();
    assert_eq!(host.stats().kv_pages_left, 2);
}

#[test]
fn no_stream_opens_without_a_free_page() {
    let mut host = host_with(3, 100);
    let mut caller = host.caller(1);
    caller.tell(open_up_to(1, 1, 3 * PAGE));
    caller.tell(open_up_to(2, 1, PAGE));
    host.run();
    caller.sink.take();
    fill(&mut caller, &mut host, 1, 2);
    // The second stream has not begun, and will take the last page.
    assert_eq!(caller.refusal(&mut host, open_up_to(3, 1, PAGE)), "kv_full");
    // Another caller is entitled to half of the pages.
    let mut other = host.caller(2);
    assert_eq!(other.ask(&mut host, open_up_to(1, 1, PAGE)), [opened(1, 1)]);
}

#[test]
fn a_caller_that_holds_its_share_of_kv_opens_no_further_stream_and_others_do() {
    let mut host = host_with(8, 50);
    let (mut caller, mut other) = (host.caller(1), host.caller(2));
    for stream in 1..=2 {
        caller.ask(&mut host, open_up_to(stream, 1, 4 * PAGE));
        fill(&mut caller, &mut host, stream, 2);
    }
    let third = || open_up_to(3, 1, PAGE);
    assert_eq!(caller.refusal(&mut host, third()), "kv_quota");
    assert_eq!(other.ask(&mut host, third()), [opened(3, 1)]);
    caller.ask(&mut host, close(1, 1));
    let again = open_up_to(3, 2, PAGE);
    assert_eq!(caller.ask(&mut host, again), [opened(3, 2)]);
}

#[test]
fn the_least_progressed_stream_is_preempted_without_affecting_others() {
    let mut host = host_with(4, 100);
    let mut caller = host.caller(1);
    for stream in 1..=3 {
        caller.ask(&mut host, open_up_to(stream, 1, 4 * PAGE));
    }
    fill(&mut caller, &mut host, 2, 1);
    fill(&mut caller, &mut host, 1, 2);
    caller.ask(&mut host, step(3, 0, &rows(3)));
    caller.tell(next(1, 2));
    caller.tell(next(2, 1));
    host.run();
    let answers = caller.sink.take();
    let [Message::StreamError(error), rest @ ..] = &answers[..] else {
        panic!("{answers:?}")
    };
    assert_eq!((error.stream, error.code.as_str()), (3, "preempted"));
    // Two streams need a page and one is free: the less progressed one is preempted as well.
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
fn a_preempted_stream_replays_to_the_same_results() {
    let mut host = host_with(3, 100);
    let (mut a, mut b) = (host.caller(1), host.caller(2));
    a.ask(&mut host, open_up_to(1, 1, 3 * PAGE));
    b.ask(&mut host, open_up_to(1, 1, 3 * PAGE));
    fill(&mut a, &mut host, 1, 2);
    fill(&mut b, &mut host, 1, 1);
    // Both need a page. The fair share is one page (half of three), and both would hold more.
    let answers = b.ask(&mut host, next(1, 1));
    assert_eq!(error_of(&answers), (1, "preempted"));
    // A page is left, so it is admitted again; the other stream goes on, and ends.
    assert_eq!(b.ask(&mut host, open_up_to(1, 2, 3 * PAGE)), [opened(1, 2)]);
    assert_eq!(result(&a.ask(&mut host, next(1, 2))).rows, 1);
    assert_eq!(a.ask(&mut host, close(1, 1)), []);
    let answers = b.ask(&mut host, step_in(2, 1, 0, &rows(PAGE + 1)));
    assert_eq!(
        result(&answers).data,
        encode(&expected(0.0, 0, &rows(PAGE + 1)))
    );
}

#[test]
fn resting_streams_are_preempted_before_running_ones() {
    let mut host = host_with(4, 100);
    let (mut a, mut b) = (host.caller(1), host.caller(2));
    a.ask(&mut host, open_up_to(1, 1, 4 * PAGE));
    fill(&mut a, &mut host, 1, 3);
    host.clock.advance(IDLE_AFTER);
    b.ask(&mut host, open_up_to(1, 1, 4 * PAGE));
    fill(&mut b, &mut host, 1, 1);
    assert_eq!(host.stats().preempted, 0, "there was a page");
    let answers = b.ask(&mut host, next(1, 1));
    assert_eq!(result(&answers).rows, 1);
    let answers = a.sink.take();
    assert_eq!(error_of(&answers), (1, "preempted"));
    assert_eq!(host.stats().preempted, 1);
}

#[test]
fn pages_beyond_a_callers_share_are_given_to_others() {
    // Caller 1 fills all pages with two busy streams.
    let mut host = host_with(8, 100);
    let (mut hog, mut other) = (host.caller(1), host.caller(2));
    for (stream, pages) in [(1, 5), (2, 3)] {
        hog.ask(&mut host, open_up_to(stream, 1, 8 * PAGE));
        fill(&mut hog, &mut host, stream, pages);
    }
    assert_eq!(
        other.ask(&mut host, open_up_to(1, 1, 8 * PAGE)),
        [opened(1, 1)]
    );
    // The other caller's share is four pages; the hog loses no more than is needed for that.
    for position in 0..4 * PAGE {
        let one = step(1, position, &rows(1));
        assert_eq!(result(&other.ask(&mut host, one)).rows, 1);
        if position % PAGE == 0 {
            hog.tell(step(1, 5 * PAGE - 1, &rows(1)));
            host.run();
        }
    }
    let lost: Vec<_> = hog
        .sink
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
    // Beyond its share it has no claim, but now pages are free.
    assert_eq!(result(&other.ask(&mut host, next(1, 4))).rows, 1);
}

#[test]
fn repeated_opens_and_closes_take_no_pages_from_others() {
    let mut host = host_with(4, 100);
    let (mut churner, mut other) = (host.caller(1), host.caller(2));
    other.ask(&mut host, open_up_to(1, 1, 4 * PAGE));
    fill(&mut other, &mut host, 1, 2);
    for epoch in 1..=50 {
        churner.tell(open_up_to(1, epoch, 2 * PAGE));
        churner.tell(step_in(epoch, 1, 0, &rows(2 * PAGE)));
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
        a.tell(step(1, position, &rows(1)));
        b.tell(step(1, position, &rows(1)));
    }
    a.tell(close(1, 1));
    // Steps that the compute thread has not dropped yet count.
    a.tell(open(1, 2));
    assert_eq!(a.refusal_now(step_in(2, 1, 0, &rows(1))), "step_quota");
    other.tell(step(1, 0, &rows(1)));
    host.run();
    assert_eq!(result(&other.sink.take()).rows, 1);
    assert_eq!(b.sink.take().len(), WAITING as usize);
    drop((a, b, other));
    host.run();
    host.assert_empty();
}

/// A caller that handles `preempted` and `kv_full` as specified: it backs off, longer each time,
/// opens a new epoch, and replays.
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

    /// Handles the answers, and sends the next row or chunk.
    fn go(&mut self, round: u32) {
        for answer in self.caller.sink.take() {
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
            self.caller.tell(open_up_to(1, self.epoch, most));
            self.held = 0;
        }
        let count = (self.known - self.held).clamp(1, 20) as usize;
        let from = self.held as usize;
        let rows = &self.rows[from..from + count];
        self.caller.tell(step_in(self.epoch, 1, self.held, rows));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Through the stream table and the scheduler: callers that share too little memory still get,
    /// row for row, the results that they would get alone.
    #[test]
    fn preempted_streams_end_with_the_same_rows(
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
fn resting_streams_give_up_their_pages_at_once() {
    let mut host = host_with(4, 100);
    let (mut a, mut b) = (host.caller(1), host.caller(2));
    a.ask(&mut host, open_up_to(1, 1, 4 * PAGE));
    fill(&mut a, &mut host, 1, 4);
    assert_eq!(a.ask(&mut host, truncate(1, 4 * PAGE)), []);
    b.ask(&mut host, open_up_to(1, 1, 4 * PAGE));
    fill(&mut b, &mut host, 1, 1);
    assert_eq!(error_of(&a.sink.take()), (1, "preempted"));
}

#[test]
fn a_short_stream_is_admitted_although_the_models_context_exceeds_the_memory() {
    // The model's context is much larger than the memory.
    let mut host = host_with(4, 100);
    const { assert!(POSITIONS > 4 * PAGE) };
    let mut caller = host.caller(1);
    let whole = open_up_to(1, 1, POSITIONS);
    assert_eq!(caller.refusal(&mut host, whole), "kv_too_small");
    assert_eq!(
        caller.ask(&mut host, open_up_to(1, 2, PAGE)),
        [opened(1, 2)]
    );
}

#[test]
fn reopening_a_stream_with_more_positions_grows_it() {
    let mut host = host_with(4, 100);
    let mut caller = host.caller(1);
    caller.ask(&mut host, open_up_to(1, 1, PAGE));
    fill(&mut caller, &mut host, 1, 1);
    assert_eq!(
        caller.ask(&mut host, open_up_to(1, 1, 2 * PAGE)),
        [opened(1, 1)]
    );
    let grown = caller.ask(&mut host, next(1, 1));
    assert_eq!(result(&grown).data, encode(&expected(15.0, PAGE, &rows(1))));
    // The same or a smaller limit is no growth; a limit that could never fit ends the stream.
    assert_eq!(caller.refusal_now(open_up_to(1, 1, PAGE)), "stale_epoch");
    assert_eq!(host.stats().streams, 1);
    let beyond = open_up_to(1, 1, 5 * PAGE);
    assert_eq!(caller.refusal(&mut host, beyond), "kv_too_small");
    host.assert_empty();
}

#[test]
fn growth_beyond_the_hosts_limit_ends_the_stream() {
    let (mut host, mut caller) = with_streams(1);
    let beyond = open_up_to(1, 1, POSITIONS + 1);
    assert_eq!(caller.refusal(&mut host, beyond), "context_full");
    host.assert_empty();
}

#[test]
fn a_caller_gets_the_cause_of_a_streams_end_before_stream_ended() {
    let (_host, mut caller) = with_streams(1);
    let handle = caller.stream_table.handle_of(1);
    let begun = std::sync::Barrier::new(2);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            handle.end(|| {
                begun.wait();
                // If the answer to the step below came too early, it would arrive now.
                for _ in 0..1000 {
                    std::thread::yield_now();
                }
                let error = StreamFault::Preempted.message(handle.name, None);
                handle.sink.send(Message::StreamError(error));
            })
        });
        begun.wait();
        caller.tell(step(1, 0, &rows(1)));
    });
    let answers = caller.sink.take();
    let [Message::StreamError(first), Message::StreamError(second)] = &answers[..] else {
        panic!("{answers:?}")
    };
    assert_eq!(first.code, "preempted");
    assert_eq!(second.code, "stream_ended");
}

#[test]
fn a_smaller_budget_takes_no_page_from_a_stream_and_holds_when_streams_end() {
    let budget = |pages: u32| Command::KvBudget(u64::from(pages * PAGE) * KV_BYTES);
    let pages = |host: &Host| {
        let stats = host.stats();
        (stats.kv_pages_used, stats.kv_pages_left)
    };
    let mut host = host_with(6, 100);
    let mut caller = host.caller(1);
    for stream in 1..=2 {
        caller.ask(&mut host, open_up_to(stream, 1, 6 * PAGE));
    }
    fill(&mut caller, &mut host, 1, 3);
    fill(&mut caller, &mut host, 2, 2);
    host.scheduler.handle(budget(2));
    assert_eq!(pages(&host), (5, 0));
    // A stream grows by the pages of another one only.
    let answers = caller.ask(&mut host, next(1, 3));
    match &answers[..] {
        [Message::StreamError(error), Message::StepResult(result)] => {
            assert_eq!((error.stream, error.code.as_str()), (2, "preempted"));
            assert_eq!(result.stream, 1);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(pages(&host), (4, 0));
    assert_eq!(caller.refusal(&mut host, open_up_to(3, 1, PAGE)), "kv_full");
    caller.ask(&mut host, close(1, 1));
    let open = |epoch, pages| open_up_to(3, epoch, pages * PAGE);
    assert_eq!(caller.refusal(&mut host, open(2, 3)), "kv_too_small");
    assert_eq!(caller.ask(&mut host, open(3, 2)), [opened(3, 3)]);
    host.scheduler.handle(budget(6));
    assert_eq!(pages(&host), (0, 6));
}
