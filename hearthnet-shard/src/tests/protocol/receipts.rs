//! Receipts: what they cover, and when they come.

use hearthnet_bus::receipt::{Claim, Inputs, Statement};
use hearthnet_engine::ARITHMETIC;
use hearthnet_transport::Receipt;

use super::*;

/// Interval of the receipts.
const EVERY: u32 = 8;
const ROW_BYTES: usize = 2 * WIDTH as usize;

/// Hashes of a stream that the caller computes itself, to check receipts.
#[derive(Clone, Default)]
struct Own {
    inputs: Inputs,
    chain: [u8; 32],
    claims: u32,
}

impl Own {
    fn answered(&mut self, step: &Step, result: &StepResult) {
        assert!(self.inputs.extend(step.position, &step.data, ROW_BYTES));
        if let Some(claim) = Claim::new(&self.inputs, result.rows, &result.data) {
            self.chain = claim.after(self.chain);
            self.claims += 1;
        }
    }

    /// Asserts that a receipt covers exactly this.
    fn is_certified(&self, stream: u32, receipt: &Receipt) {
        let statement = Statement {
            host: owner(),
            caller: caller_id(2).node,
            weights: served().weights,
            layers: (2, 5),
            arithmetic: ARITHMETIC.into(),
            stream,
            epoch: 1,
            claims: self.claims,
            chain: self.chain,
        };
        assert_eq!((receipt.stream, receipt.epoch), (stream, 1));
        assert_eq!(receipt.claims.get(), self.claims);
        assert_eq!(receipt.chain, self.chain);
        assert_eq!(statement.verify(&receipt.signature), Ok(()));
    }
}

fn exact() -> Host {
    let served = Served {
        arithmetic: ARITHMETIC.into(),
        ..served()
    };
    Host::serving(served, |_| {})
}

fn wants_receipts(host: &Host) -> Caller {
    host.caller_as(CallerId {
        receipts: EVERY,
        ..caller_id(2)
    })
}

/// The receipts among some messages.
fn receipts(messages: &[Message]) -> Vec<Receipt> {
    let receipt = |message: &Message| match message {
        Message::Receipt(receipt) => Some(*receipt),
        _ => None,
    };
    messages.iter().filter_map(receipt).collect()
}

impl Caller {
    /// Runs a step and takes it into `own`. Returns the receipts that came with its answer.
    fn run(&mut self, host: &mut Host, own: &mut Own, step: Step) -> Vec<Receipt> {
        let answers = self.ask(host, Message::Step(step.clone()));
        let [Message::StepResult(result), after @ ..] = &answers[..] else {
            panic!("{answers:?}");
        };
        own.answered(&step, result);
        receipts(after)
    }
}

#[test]
fn a_receipt_comes_every_so_many_positions_when_the_stream_rests_and_at_its_end() {
    let (mut host, mut own) = (exact(), Own::default());
    let mut caller = wants_receipts(&host);
    caller.open(&mut host, 1);
    // A prompt that the host cuts into pieces, of which it returns the last row.
    let prompt = Step {
        want: Want::Last,
        ..step_of(1, 0, &rows(200))
    };
    let [receipt] = caller.run(&mut host, &mut own, prompt)[..] else {
        panic!("one receipt");
    };
    own.is_certified(1, &receipt);
    for position in 200..200 + EVERY - 1 {
        assert_eq!(
            caller.run(&mut host, &mut own, step_of(1, position, &rows(1))),
            []
        );
    }
    let more = caller.run(&mut host, &mut own, step_of(1, 200 + EVERY - 1, &rows(1)));
    own.is_certified(1, &more[0]);
    // The step is repeated, and the stream rests.
    assert_eq!(
        caller.run(&mut host, &mut own, step_of(1, 204, &rows(2))),
        []
    );
    let rests = receipts(&caller.ask(&mut host, truncate(1, 205)));
    own.is_certified(1, &rests[0]);
    own.inputs.truncate(205);
    // Without a new answer there is no receipt.
    assert_eq!(receipts(&caller.ask(&mut host, truncate(1, 205))), []);
    assert_eq!(
        caller.run(&mut host, &mut own, step_of(1, 205, &rows(3))),
        []
    );
    let ends = receipts(&caller.ask(&mut host, close(1, 1)));
    own.is_certified(1, &ends[0]);
    assert_eq!((rests.len(), ends.len()), (1, 1));
    host.assert_empty();
}

#[test]
fn a_fork_is_certified_with_the_rows_of_its_source() {
    let (mut host, mut own) = (exact(), Own::default());
    let mut caller = wants_receipts(&host);
    caller.open(&mut host, 1);
    caller.run(&mut host, &mut own, step_of(1, 0, &rows(6)));
    assert_eq!(caller.ask(&mut host, fork_of(2, 1, 4)), [opened(2, 1)]);
    let mut forked = Own {
        inputs: own.inputs.fork(4),
        ..Own::default()
    };
    caller.run(&mut host, &mut forked, step_of(2, 4, &rows(3)));
    let ends = receipts(&caller.ask(&mut host, close(2, 1)));
    forked.is_certified(2, &ends[0]);
}

#[test]
fn an_answered_truncation_goes_back_to_the_rows_that_are_kept_and_certifies_nothing() {
    let (mut host, mut own) = (exact(), Own::default());
    host.probe.checkpoints.store(4, Ordering::SeqCst);
    let mut caller = wants_receipts(&host);
    caller.open(&mut host, 1);
    assert_eq!(caller.run(&mut host, &mut own, step_of(1, 0, &rows(7))), []);
    let answers = caller.ask(&mut host, truncate_and_tell(1, 6));
    assert_eq!(answers, [truncated(1, 4)]);
    // The rows of positions 4 and 5 again, and another one behind them.
    let more = [rows(6)[4..].to_vec(), rows(1)].concat();
    let [receipt] = caller.run(&mut host, &mut own, step_of(1, 4, &more))[..] else {
        panic!("one receipt");
    };
    own.is_certified(1, &receipt);
}

#[test]
fn a_stream_that_the_host_ends_is_certified_too() {
    let (mut host, mut own) = (exact(), Own::default());
    let mut caller = wants_receipts(&host);
    caller.open(&mut host, 1);
    caller.run(&mut host, &mut own, step_of(1, 0, &rows(3)));
    let answers = caller.ask(&mut host, step(1, 9, &rows(1)));
    let is_error = |message: &Message| matches!(message, Message::StreamError(_));
    assert!(answers.iter().any(is_error));
    own.is_certified(1, &receipts(&answers)[0]);
}

#[test]
fn without_agreement_or_exact_arithmetic_there_is_no_receipt() {
    for (mut host, receipts_wanted) in [(exact(), 0), (Host::new(), EVERY)] {
        let mut caller = host.caller_as(CallerId {
            receipts: receipts_wanted,
            ..caller_id(2)
        });
        caller.open(&mut host, 1);
        let answers = caller.ask(&mut host, step(1, 0, &rows(3 * EVERY)));
        assert_eq!(receipts(&answers), []);
        assert_eq!(receipts(&caller.ask(&mut host, close(1, 1))), []);
    }
}
