use proptest::prelude::*;
use serde_json::json;

use super::*;

fn request() -> Request {
    Request::Plain {
        capability: "a.b@1.0".parse().unwrap(),
        params: json!({"x": 1}),
    }
}

/// Both sides, and the messages in transit between them.
#[derive(Default)]
struct Pair {
    caller: CallingSession,
    server: ServingSession,
    to_server: VecDeque<String>,
    to_caller: VecDeque<String>,
}

impl Pair {
    fn send(&mut self) {
        while let Some(text) = self.caller.poll_transmit() {
            self.to_server.push_back(text);
        }
        while let Some(text) = self.server.poll_transmit() {
            self.to_caller.push_back(text);
        }
    }

    /// Delivers all messages in transit. Returns the server's events.
    fn settle(&mut self) -> Vec<ServerEvent> {
        let mut asked = Vec::new();
        loop {
            self.send();
            if let Some(text) = self.to_server.pop_front() {
                asked.push(self.server.receive(&text).unwrap());
            } else if let Some(text) = self.to_caller.pop_front() {
                self.caller.receive(&text).unwrap();
            } else {
                return asked;
            }
        }
    }

    fn open(&mut self) -> u32 {
        let call = self.caller.call(&request()).unwrap();
        let request = Ok(request());
        assert_eq!(self.settle(), [ServerEvent::Open { call, request }]);
        call
    }

    fn heard(&mut self, call: u32) -> Vec<ClientEvent> {
        std::iter::from_fn(|| self.caller.take(call)).collect()
    }

    /// The server sends the event `tick`.
    fn tick(&mut self, call: u32, data: &Value) -> Result<(), NotTaken> {
        self.server.event(call, "tick", data)
    }

    /// A pair with an open call whose window of events is full.
    fn full() -> (Self, u32) {
        let mut pair = Self::default();
        let call = pair.open();
        for n in 0..WINDOW_FRAMES {
            pair.tick(call, &json!(n)).unwrap();
        }
        (pair, call)
    }
}

fn tick(n: u64) -> ClientEvent {
    ClientEvent::Event {
        event: "tick".into(),
        data: json!(n),
    }
}

#[test]
fn a_call_has_its_events_in_order_and_one_end() {
    let mut pair = Pair::default();
    let call = pair.open();
    for n in 0..3 {
        pair.tick(call, &json!(n)).unwrap();
    }
    pair.server.finish(call, Ok(&json!({"done": true})));
    pair.server.finish(call, Ok(&json!("a second end is none")));
    assert_eq!(pair.tick(call, &json!(3)), Err(NotTaken::Ended));
    pair.settle();
    let end = ClientEvent::End(json!({"done": true}));
    assert_eq!(pair.heard(call), [tick(0), tick(1), tick(2), end]);
    assert_eq!((pair.caller.calls.len(), pair.server.open_calls()), (0, 0));
}

#[test]
fn messages_look_as_the_specification_says() {
    let mut pair = Pair::default();
    let call = pair.caller.call(&request()).unwrap();
    assert_eq!(
        pair.caller.poll_transmit().unwrap(),
        r#"{"call":1,"seq":1,"event":"call","data":{"capability":"a.b@1.0","params":{"x":1}}}"#
    );
    pair.caller.cancel(call);
    assert_eq!(
        pair.caller.poll_transmit().unwrap(),
        r#"{"call":1,"seq":2,"event":"cancel","data":{}}"#
    );
    let mut pair = Pair::default();
    let call = pair.open();
    pair.tick(call, &json!(["é"])).unwrap();
    assert_eq!(
        pair.server.poll_transmit().unwrap(),
        r#"{"call":1,"seq":1,"event":"tick","data":["é"]}"#
    );
    let error = CallError::new(Code::BUSY, "later").with_hint("wait");
    pair.server.finish(call, Err(&error));
    assert_eq!(
        pair.server.poll_transmit().unwrap(),
        r#"{"call":1,"seq":2,"event":"error","data":{"code":"busy","message":"later","hint":"wait"}}"#
    );
}

#[test]
fn a_caller_that_takes_nothing_stops_the_events_and_acknowledging_lets_them_go_on() {
    let (mut pair, call) = Pair::full();
    assert_eq!(pair.tick(call, &json!(64)), Err(NotTaken::Full));
    assert!(pair.settle().is_empty(), "nothing was acknowledged");
    for n in 0..ACK_FRAMES {
        assert_eq!(pair.caller.take(call), Some(tick(n)));
    }
    assert_eq!(pair.settle(), [ServerEvent::Room { call }]);
    for n in 0..ACK_FRAMES {
        pair.tick(call, &json!(n)).unwrap();
    }
    assert_eq!(pair.tick(call, &json!(0)), Err(NotTaken::Full));
}

#[test]
fn large_events_are_bounded_in_bytes_and_come_through() {
    let mut pair = Pair::default();
    let call = pair.open();
    let large = json!("x".repeat(MAX_EVENT_BYTES - 200));
    let mut sent = 0;
    for _ in 0..50 {
        while pair.tick(call, &large).is_ok() {
            sent += 1;
        }
        pair.settle();
        pair.heard(call);
        pair.settle();
    }
    assert_eq!(sent, 100, "two at a time");
    let too_large = json!("x".repeat(MAX_EVENT_BYTES));
    assert_eq!(pair.tick(call, &too_large), Err(NotTaken::TooBig));
}

#[test]
fn a_result_that_fits_no_message_is_an_error() {
    let mut pair = Pair::default();
    let call = pair.open();
    pair.server
        .finish(call, Ok(&json!("x".repeat(MAX_MESSAGE_BYTES))));
    pair.settle();
    let heard = pair.heard(call);
    assert!(matches!(&heard[..], [ClientEvent::Failed(e)] if e.code() == &Code::INTERNAL));
}

#[test]
fn the_protocols_own_names_cannot_be_events() {
    let mut pair = Pair::default();
    let call = pair.open();
    for name in ["call", "ack", "cancel", "end", "error", "", "A", "a\"b"] {
        let taken = pair.server.event(call, name, &json!(0));
        assert_eq!(taken, Err(NotTaken::Name), "{name}");
    }
}

#[test]
fn a_cancelled_call_drops_what_waits_and_is_answered_with_cancelled() {
    let (mut pair, call) = Pair::full();
    pair.caller.cancel(call);
    let text = pair.caller.poll_transmit().unwrap();
    let cancelled = Ok(ServerEvent::Cancelled { call });
    assert_eq!(pair.server.receive(&text), cancelled);
    assert_eq!(pair.server.open_calls(), 0);
    let last = pair.server.poll_transmit().unwrap();
    let ends = r#""seq":1,"event":"error","data":{"code":"cancelled""#;
    assert!(last.contains(ends), "{last}");
    assert_eq!(pair.server.poll_transmit(), None);
    assert_eq!(pair.caller.calls.len(), 1, "its end was not seen yet");
    pair.caller.receive(&last).unwrap();
    assert_eq!(pair.caller.calls.len(), 0);
    assert_eq!(pair.caller.take(call), None);
}

#[test]
fn events_on_their_way_when_a_call_is_cancelled_do_no_harm() {
    let (mut pair, call) = Pair::full();
    pair.server.finish(call, Ok(&json!(null)));
    pair.send();
    pair.caller.cancel(call);
    assert_eq!(pair.settle(), [ServerEvent::Nothing]);
    assert_eq!(pair.caller.calls.len(), 0);
    pair.open();
}

#[test]
fn calls_of_one_connection_do_not_wait_for_each_other() {
    let mut pair = Pair::default();
    let (slow, quick) = (pair.open(), pair.open());
    while pair.tick(slow, &json!(0)).is_ok() {}
    pair.tick(quick, &json!(1)).unwrap();
    pair.server.finish(quick, Ok(&json!(2)));
    pair.settle();
    assert_eq!(pair.heard(quick), [tick(1), ClientEvent::End(json!(2))]);
}

#[test]
fn one_more_call_than_allowed_is_refused_here_and_there() {
    let mut pair = Pair::default();
    let calls: Vec<u32> = (0..MAX_OPEN_CALLS).map(|_| pair.open()).collect();
    let refused = pair.caller.call(&request()).unwrap_err();
    assert_eq!(refused.code(), &Code::BUSY);
    let text = Frame::encode(99, 1, "call", "{}");
    let broken = pair.server.receive(&text).unwrap_err();
    assert_eq!(broken.code, CloseCode::SessionLimit);
    // A cancelled call counts until its end was received.
    pair.caller.cancel(calls[0]);
    assert!(pair.caller.call(&request()).is_err());
    pair.settle();
    pair.open();
}

#[test]
fn a_call_that_cannot_be_read_costs_that_call_alone() {
    let mut pair = Pair::default();
    let cases = [
        r#"{}"#,
        r#"{"capability":"A","params":{}}"#,
        r#"{"capability":"a@1.0","params":{},"more":1}"#,
        r#"{"envelope":1,"params":"{}"}"#,
        r#"7"#,
    ];
    for (n, data) in cases.into_iter().enumerate() {
        let call = n as u32 + 1;
        match pair.server.receive(&Frame::encode(call, 1, "call", data)) {
            Ok(ServerEvent::Open {
                call: opened,
                request: Err(error),
            }) => {
                assert_eq!((opened, error.code()), (call, &Code::BAD_REQUEST), "{data}");
            }
            other => panic!("{data}: {other:?}"),
        }
    }
}

#[test]
fn each_broken_rule_has_its_own_name() {
    let opened = || {
        let mut pair = Pair::default();
        let call = pair.open();
        for n in 0..3 {
            pair.tick(call, &json!(n)).unwrap();
        }
        pair.settle();
        pair.server
    };
    let long = format!(r#"{{"x":"{}"}}"#, "x".repeat(MAX_MESSAGE_BYTES));
    let cases: [(CloseCode, &[&str]); 5] = [
        (CloseCode::FrameTooBig, &[long.as_str()]),
        (
            CloseCode::FrameUnknown,
            &[
                "",
                "[]",
                r#"{"call":1,"seq":2,"event":"ack"}"#,
                r#"{"call":1,"seq":2,"event":"ack","data":{},"x":0}"#,
                r#"{"call":1,"seq":2,"event":"ack","data":{}}"#,
                r#"{"call":1,"seq":2,"event":"Ack","data":{"seq":1}}"#,
                r#"{"call":1,"seq":2,"event":"end","data":{}}"#,
                r#"{"call":-1,"seq":2,"event":"ack","data":{"seq":1}}"#,
            ],
        ),
        (
            CloseCode::FrameSequence,
            &[
                r#"{"call":1,"seq":3,"event":"ack","data":{"seq":1}}"#,
                r#"{"call":1,"seq":1,"event":"ack","data":{"seq":1}}"#,
                r#"{"call":2,"seq":2,"event":"call","data":{}}"#,
            ],
        ),
        (
            CloseCode::ProtocolState,
            &[
                r#"{"call":1,"seq":1,"event":"call","data":{}}"#,
                r#"{"call":0,"seq":1,"event":"call","data":{}}"#,
                r#"{"call":2,"seq":1,"event":"cancel","data":{}}"#,
                r#"{"call":0,"seq":1,"event":"cancel","data":{}}"#,
            ],
        ),
        (
            CloseCode::CreditAck,
            &[
                r#"{"call":1,"seq":2,"event":"ack","data":{"seq":0}}"#,
                r#"{"call":1,"seq":2,"event":"ack","data":{"seq":4}}"#,
            ],
        ),
    ];
    for (code, texts) in cases {
        for text in texts {
            let violation = opened().receive(text).unwrap_err();
            assert_eq!(violation.code, code, "{text}: {violation}");
        }
    }
}

#[test]
fn a_flood_about_calls_that_ended_is_cut_off() {
    let mut pair = Pair::default();
    let call = pair.open();
    pair.server.finish(call, Ok(&json!(null)));
    let text = Frame::encode(call, 2, "cancel", "{}");
    let taken = (0..1000).take_while(|_| pair.server.receive(&text).is_ok());
    assert_eq!(taken.count() as u64, LATE_PER_CALL);
    let broken = pair.server.receive(&text).unwrap_err();
    assert_eq!(broken.code, CloseCode::FrameRate);
}

#[test]
fn a_caller_notices_a_node_that_breaks_the_rules() {
    let opened = || {
        let mut pair = Pair::default();
        pair.open();
        pair.caller
    };
    for (code, text) in [
        (
            CloseCode::ProtocolState,
            r#""call":2,"seq":1,"event":"tick","data":0"#,
        ),
        (
            CloseCode::FrameSequence,
            r#""call":1,"seq":2,"event":"tick","data":0"#,
        ),
        (
            CloseCode::FrameUnknown,
            r#""call":1,"seq":1,"event":"ack","data":{"seq":1}"#,
        ),
        (
            CloseCode::FrameUnknown,
            r#""call":1,"seq":1,"event":"error","data":{}"#,
        ),
        (
            CloseCode::FrameUnknown,
            r#""call":1,"seq":1,"event":"error","data":{"code":"","message":""}"#,
        ),
    ] {
        let text = format!("{{{text}}}");
        assert_eq!(opened().receive(&text).unwrap_err().code, code, "{text}");
    }
    let mut caller = opened();
    for seq in 1..=WINDOW_FRAMES {
        caller.receive(&Frame::encode(1, seq, "tick", "0")).unwrap();
    }
    let overrun = Frame::encode(1, WINDOW_FRAMES + 1, "tick", "0");
    let broken = caller.receive(&overrun).unwrap_err();
    assert_eq!(broken.code, CloseCode::CreditOverrun);
    let mut caller = opened();
    caller.receive(&Frame::encode(1, 1, "end", "0")).unwrap();
    let after = Frame::encode(1, 2, "end", "0");
    assert_eq!(caller.receive(&after), Err(call_number(1)));
}

#[derive(Debug, Clone)]
enum Move {
    Call,
    Event(usize, usize),
    Finish(usize, bool),
    Take(usize, usize),
    Cancel(usize),
    ToServer(usize),
    ToCaller(usize),
}

fn moves() -> impl Strategy<Value = Move> {
    prop_oneof![
        Just(Move::Call),
        (0usize..20, 0usize..3).prop_map(|(c, n)| Move::Event(c, n)),
        (0usize..20, 0usize..3).prop_map(|(c, n)| Move::Event(c, n)),
        (0usize..20, any::<bool>()).prop_map(|(c, ok)| Move::Finish(c, ok)),
        (0usize..20, 1usize..40).prop_map(|(c, n)| Move::Take(c, n)),
        (0usize..20).prop_map(Move::Cancel),
        (1usize..20).prop_map(Move::ToServer),
        (1usize..20).prop_map(Move::ToCaller),
    ]
}

proptest! {
    /// For any steps of two honest sides and any delays: no protocol violation, events in order
    /// without gaps, one end per call, and no state left behind.
    #[test]
    fn honest_sides_agree(script in prop::collection::vec(moves(), 1..200)) {
        let sizes = [1usize, 5000, MAX_EVENT_BYTES - 200];
        let mut pair = Pair::default();
        let (mut open, mut cancelled) = (Vec::new(), Vec::new());
        let mut counters: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
        let mut ended: BTreeMap<u32, usize> = BTreeMap::new();
        let pick = |open: &Vec<u32>, n: usize| open.get(n % open.len().max(1)).copied();
        for step in script {
            match step {
                Move::Call => if let Ok(call) = pair.caller.call(&request()) { open.push(call) },
                Move::Event(n, size) => if let Some(call) = pick(&open, n) {
                    let next = &mut counters.entry(call).or_default().0;
                    let data = json!({"n": *next, "pad": "x".repeat(sizes[size])});
                    if pair.tick(call, &data).is_ok() { *next += 1; }
                },
                Move::Finish(n, ok) => if let Some(call) = pick(&open, n) {
                    let error = CallError::new(Code::TIMEOUT, "late");
                    let value = json!(call);
                    pair.server.finish(call, if ok { Ok(&value) } else { Err(&error) });
                },
                Move::Take(n, times) => if let Some(call) = pick(&open, n) {
                    for _ in 0..times {
                        match pair.caller.take(call) {
                            Some(ClientEvent::Event { data, .. }) => {
                                let due = &mut counters.entry(call).or_default().1;
                                prop_assert_eq!(&data["n"], &json!(*due));
                                *due += 1;
                            }
                            Some(_) => *ended.entry(call).or_default() += 1,
                            None => break,
                        }
                    }
                },
                Move::Cancel(n) => if let Some(call) = pick(&open, n) {
                    pair.caller.cancel(call);
                    cancelled.push(call);
                },
                Move::ToServer(times) => {
                    pair.send();
                    for text in pair.to_server.drain(..times.min(pair.to_server.len())) {
                        pair.server.receive(&text).unwrap();
                    }
                }
                Move::ToCaller(times) => {
                    pair.send();
                    for text in pair.to_caller.drain(..times.min(pair.to_caller.len())) {
                        pair.caller.receive(&text).unwrap();
                    }
                }
            }
            prop_assert!(pair.server.open_calls() <= MAX_OPEN_CALLS);
            for (call, serving) in &pair.server.calls {
                let held: usize = serving.sizes.iter().sum();
                prop_assert!(held <= WINDOW_BYTES, "call {call} holds {held}");
                prop_assert_eq!(serving.sizes.len() as u64, serving.queued - serving.acked);
            }
        }
        pair.settle();
        for call in &open {
            pair.server.finish(*call, Ok(&json!(null)));
        }
        pair.settle();
        for call in &open {
            while let Some(heard) = pair.caller.take(*call) {
                if !matches!(heard, ClientEvent::Event { .. }) {
                    *ended.entry(*call).or_default() += 1;
                }
            }
            let ends = ended.get(call).copied().unwrap_or(0);
            prop_assert!(ends == 1 || (ends == 0 && cancelled.contains(call)), "call {call}: {ends}");
        }
        pair.settle();
        prop_assert_eq!((pair.server.open_calls(), pair.caller.calls.len()), (0, 0));
        prop_assert!(pair.server.outbox.is_empty() && pair.server.final_frames.is_empty());
    }

    #[test]
    fn arbitrary_text_never_panics(texts in prop::collection::vec(".{0,80}", 0..8)) {
        let (mut server, mut caller) = (ServingSession::default(), CallingSession::default());
        for text in texts {
            let _ = server.receive(&text);
            let _ = caller.receive(&text);
        }
    }
}
