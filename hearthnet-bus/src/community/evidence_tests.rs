//! Evidence and its check.

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use sha2::{Digest as _, Sha256};

use super::*;
use crate::NodeKey;
use crate::sealed::{self, OpenError};
use crate::testing::{id, key};

const ROW: usize = 4;
const ACCUSED: u8 = 1;
const ACCUSER: u8 = 2;
const WITNESS: u8 = 3;
const JUDGE: u8 = 4;
const EXACT: &str = "canonical-1";

/// Row of a host that computes as specified: it depends on all rows up to it.
fn computed(rows: &[u8]) -> Vec<u8> {
    let ends = (ROW..=rows.len()).step_by(ROW);
    ends.flat_map(|end| Sha256::digest(&rows[..end])[..ROW].to_vec())
        .collect()
}

/// Host of a stream: what it signs.
struct Host {
    key: NodeKey,
    signed: SignedClaims,
    inputs: Inputs,
    rows: Vec<u8>,
}

impl Host {
    fn new(seed: u8) -> Self {
        let statement = Statement {
            host: id(seed),
            caller: id(ACCUSER),
            weights: [6; 32],
            layers: (2, 5),
            arithmetic: EXACT.into(),
            stream: u32::from(seed),
            epoch: 0,
            claims: 0,
            chain: [0; 32],
        };
        Self {
            key: key(seed),
            signed: SignedClaims {
                signature: [0; SIGNATURE_BYTES],
                statement,
                before: [0; 32],
                claims: Vec::new(),
            },
            inputs: Inputs::default(),
            rows: Vec::new(),
        }
    }

    /// Answers a step with its last `want` rows, of which the first is wrong if it lies.
    fn step(&mut self, rows: &[u8], want: usize, lies: bool) {
        self.rows.extend_from_slice(rows);
        assert!(self.inputs.extend(self.inputs.length(), rows, ROW));
        let all = computed(&self.rows);
        let mut back = all[all.len() - want * ROW..].to_vec();
        back[0] ^= u8::from(lies);
        let claim = Claim::new(&self.inputs, want as u32, &back).unwrap();
        self.signed.claims.push(claim);
        let told = &mut self.signed.statement;
        told.claims += 1;
        told.chain = claim.after(told.chain);
    }

    /// Signed claims from `first` on.
    fn proof(&mut self, first: usize) -> SignedClaims {
        self.signed.signature = self.signed.statement.sign(&self.key);
        self.signed.from(first).unwrap()
    }
}

fn rows(from: u8, count: u8) -> Vec<u8> {
    (from..from + count).flat_map(|n| [n; ROW]).collect()
}

/// Host that answered a prompt of five rows and two more steps.
fn accused(lies: bool) -> Host {
    let mut host = Host::new(ACCUSED);
    host.step(&rows(0, 5), 1, false);
    host.step(&rows(5, 1), 1, lies);
    host.step(&rows(6, 1), 1, false);
    host
}

/// Host that computed the same rows in an audit.
fn witness(lies: bool) -> Host {
    let mut host = Host::new(WITNESS);
    host.step(&rows(0, 4), 4, false);
    host.step(&rows(4, 3), 3, lies);
    host
}

/// Evidence about the accused's second answer, if these hosts lie.
fn evidence(accused_lies: bool, witness_lies: Option<bool>) -> Evidence {
    let witness = witness_lies.map(|lies| witness(lies).proof(1));
    Evidence::new(
        ROW as u32,
        rows(0, 7),
        accused(accused_lies).proof(1),
        witness,
    )
    .unwrap()
}

/// Check by a judge of the sealed bytes.
fn judge(sealed: &[u8], accuser: u8, dispute: &Dispute, judge: u8) -> Result<Finding, OpenError> {
    let content = sealed::open(sealed, &key(judge))?;
    let checked = Evidence::decode(&content).and_then(|evidence| {
        evidence.check(&id(accuser), dispute, EXACT)?;
        Ok(evidence)
    });
    Ok(match checked {
        Ok(evidence) => evidence.finding(&computed(&evidence.rows), ROW),
        Err(_) => Finding::None,
    })
}

fn fault(evidence: &Evidence, dispute: &Dispute) -> Result<(), EvidenceFault> {
    evidence.check(&id(ACCUSER), dispute, EXACT)
}

fn announced(evidence: &Evidence) -> Dispute {
    evidence.dispute([9; 32], 1)
}

#[test]
fn the_finding_is_what_the_rows_say() {
    for (accused, witness, finding) in [
        (true, None, Finding::Accused),
        (false, None, Finding::None),
        (true, Some(false), Finding::Accused),
        (false, Some(true), Finding::Witness),
        (true, Some(true), Finding::Both),
        (false, Some(false), Finding::None),
    ] {
        let evidence = evidence(accused, witness);
        let sealed = sealed::seal(&evidence.encode(), [id(JUDGE)])
            .unwrap()
            .unwrap();
        let dispute = evidence.dispute(Sha256::digest(&sealed).into(), sealed.len() as u64);
        let found = judge(&sealed, ACCUSER, &dispute, JUDGE);
        assert_eq!(found, Ok(finding), "{accused} {witness:?}");
        // A node that it is not sealed to finds nothing.
        let found = judge(&sealed, ACCUSER, &dispute, ACCUSED);
        assert_eq!(found, Err(OpenError::OtherReaders));
        assert_eq!(Evidence::decode(&evidence.encode()), Ok(evidence));
    }
}

#[test]
fn it_has_the_shortest_prefix_of_the_rows_that_shows_the_mismatch() {
    let alone = evidence(true, None);
    assert_eq!(alone.rows, rows(0, 6));
    assert_eq!(alone.accused.claims.len(), 2);
    // The witness has signed the last three rows at once.
    assert_eq!(evidence(true, Some(false)).rows, rows(0, 7));
    let too_few = Evidence::new(ROW as u32, rows(0, 5), accused(true).proof(1), None);
    assert_eq!(too_few, None);
    let shown = format!("{alone:?}");
    assert!(shown.starts_with("Evidence(24 bytes of rows"), "{shown}");
}

#[test]
fn an_accuser_that_alters_rows_accuses_falsely() {
    let honest = evidence(false, None);
    let dispute = announced(&honest);
    assert_eq!(fault(&honest, &dispute), Ok(()));
    for at in 0..honest.rows.len() {
        let mut altered = honest.clone();
        altered.rows[at] ^= 1;
        assert_eq!(fault(&altered, &dispute), Err(EvidenceFault::Rows));
    }
    // Rows that are cut in another way, missing or added.
    let changes: [fn(&mut Evidence); 5] = [
        |e| e.row_bytes = 8,
        |e| e.row_bytes = 0,
        |e| e.rows.truncate(5 * ROW),
        |e| e.rows.extend([0; ROW]),
        |e| e.accused.claims.clear(),
    ];
    for change in changes {
        let mut altered = honest.clone();
        change(&mut altered);
        assert_eq!(fault(&altered, &dispute), Err(EvidenceFault::Rows));
    }
}

#[test]
fn an_accuser_that_alters_claims_or_receipts_accuses_falsely() {
    use EvidenceFault::{Chain, Signature};
    let honest = evidence(false, Some(false));
    let changes: [(fn(&mut Evidence), EvidenceFault); 8] = [
        (|e| e.accused.claims[0].output = [1; 32], Chain),
        (|e| e.accused.claims[0].rows = 2, Chain),
        (|e| e.accused.claims.truncate(1), Chain),
        (|e| e.accused.before = [1; 32], Chain),
        (|e| e.accused.statement.chain = [1; 32], Signature),
        (|e| e.accused.statement.claims += 1, Signature),
        (|e| e.accused.signature[0] ^= 1, Signature),
        (
            // A witness that vouches for itself by the signature of another.
            |e| e.witness.as_mut().unwrap().signature = e.accused.signature,
            Signature,
        ),
    ];
    for (change, expected) in changes {
        let mut altered = honest.clone();
        change(&mut altered);
        // It announces what it has altered.
        assert_eq!(fault(&altered, &announced(&altered)), Err(expected));
        // Or it announces the true receipts.
        assert!(fault(&altered, &announced(&honest)).is_err());
    }
}

#[test]
fn a_receipt_of_another_stream_convicts_no_host() {
    // The accused was honest in a stream of other rows, of which the accuser has the receipt.
    let mut other = Host::new(ACCUSED);
    other.step(&rows(100, 6), 1, false);
    other.step(&rows(110, 1), 1, false);
    let replayed = Evidence::new(ROW as u32, rows(0, 6), other.proof(0), None).unwrap();
    let found = fault(&replayed, &announced(&replayed));
    assert_eq!(found, Err(EvidenceFault::Rows));
    // With its own rows the receipt is in order, and shows that the host is honest.
    let mut own = rows(100, 6);
    own.extend(rows(110, 1));
    let own = Evidence::new(ROW as u32, own, other.proof(0), None).unwrap();
    assert_eq!(fault(&own, &announced(&own)), Ok(()));
    assert_eq!(own.finding(&computed(&own.rows), ROW), Finding::None);
}

#[test]
fn evidence_of_another_dispute_does_not_count() {
    let (own, other) = (evidence(true, None), evidence(true, Some(false)));
    let dispute = announced(&own);
    assert_eq!(fault(&other, &dispute), Err(EvidenceFault::Parties));
    // Of a receipt with the same parties.
    let mut longer = accused(true);
    longer.step(&rows(7, 1), 1, false);
    let longer = Evidence::new(ROW as u32, rows(0, 8), longer.proof(1), None).unwrap();
    assert_eq!(fault(&longer, &dispute), Err(EvidenceFault::Subject));
    // Another member announces the evidence of the accuser.
    let stolen = own.check(&id(WITNESS), &dispute, EXACT);
    assert_eq!(stolen, Err(EvidenceFault::Parties));
    let changes: [fn(&mut Dispute); 6] = [
        |d| d.layers.1 += 1,
        |d| d.weights[0] ^= 1,
        |d| d.accused = id(JUDGE),
        |d| d.witness = Some(id(WITNESS)),
        |d| d.receipts[0][0] ^= 1,
        |d| d.receipts.clear(),
    ];
    for change in changes {
        let mut changed = dispute.clone();
        change(&mut changed);
        assert!(fault(&own, &changed).is_err(), "{changed:?}");
    }
    // Of another arithmetic, no judge can compute the same bits.
    let inexact = own.check(&id(ACCUSER), &dispute, "torch-cpu-fp32");
    assert_eq!(inexact, Err(EvidenceFault::Subject));
}

#[test]
fn a_longer_proof_than_allowed_is_no_evidence() {
    let mut host = Host::new(ACCUSED);
    host.step(&rows(0, 1), 1, false);
    let mut proof = host.proof(0);
    proof.claims = vec![proof.claims[0]; MAX_PROOF_CLAIMS + 1];
    assert_eq!(Evidence::new(ROW as u32, rows(0, 1), proof, None), None);
}

/// Change of evidence, and the fault that the fuzz target then finds in it, which announces what it
/// reads.
type Seed = (&'static str, Option<EvidenceFault>, fn(&mut Evidence));

/// `HEARTHNET_WRITE_CORPUS=1` writes the seeds after a change.
#[test]
fn the_fuzzer_begins_with_evidence_of_every_finding_and_fault() {
    use EvidenceFault::{Chain, Parties, Rows, Signature, Subject};
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/evidence");
    let is_written = std::env::var_os("HEARTHNET_WRITE_CORPUS").is_some();
    let both = evidence(true, Some(true));
    let seeds: [Seed; 13] = [
        ("with-witness", None, |_| {}),
        ("alone", None, |e| *e = evidence(true, None)),
        ("last-answer", None, |e| *e = evidence_of_one_answer()),
        ("other-caller", Some(Parties), |e| {
            e.witness.as_mut().unwrap().statement.caller = id(JUDGE);
        }),
        ("other-layers", Some(Subject), |e| {
            e.witness.as_mut().unwrap().statement.layers = (2, 6);
        }),
        ("other-arithmetic", Some(Subject), |e| {
            e.accused.statement.arithmetic = "torch-cpu-fp32".into();
        }),
        ("signature", Some(Signature), |e| {
            e.accused.signature[0] ^= 1;
        }),
        ("chain", Some(Chain), |e| e.accused.before = [1; 32]),
        ("claim-of-no-rows", Some(Chain), |e| {
            e.accused.claims[0].rows = 0;
        }),
        ("other-rows", Some(Rows), |e| e.rows[0] ^= 1),
        ("few-rows", Some(Rows), |e| e.rows.truncate(ROW)),
        ("longer-rows", Some(Rows), |e| e.row_bytes = 8),
        ("claim-of-many-rows", Some(Rows), |e| {
            *e = evidence_of_many_rows();
        }),
    ];
    for (name, expected, change) in seeds {
        let mut evidence = both.clone();
        change(&mut evidence);
        let accuser = evidence.accused.statement.caller;
        let found = evidence.check(&accuser, &evidence.dispute([0; 32], 1), EXACT);
        assert_eq!(found.err(), expected, "{name}");
        let bytes = evidence.encode();
        if is_written {
            fs::write(corpus.join(name), &bytes).unwrap();
        }
        assert_eq!(fs::read(corpus.join(name)).unwrap(), bytes, "{name}");
    }
    // Sealed bytes are random: what the target finds in them is compared.
    let whole = both.encode();
    let (of_judge, of_two) = (vec![id(JUDGE)], vec![id(JUDGE), id(WITNESS)]);
    let closed: [(&str, &[u8], Vec<NodeId>, Option<Result<Vec<u8>, OpenError>>); 4] = [
        ("sealed-to-two", &whole, of_two, Some(Ok(whole.clone()))),
        (
            "sealed-garbage",
            b"no evidence",
            of_judge.clone(),
            Some(Ok(b"no evidence".to_vec())),
        ),
        (
            "sealed-to-another",
            &whole,
            vec![id(WITNESS)],
            Some(Err(OpenError::OtherReaders)),
        ),
        ("sealed-and-damaged", &whole, of_judge, None),
    ];
    for (name, content, readers, expected) in closed {
        if is_written {
            let mut bytes = sealed::seal(content, readers).unwrap().unwrap();
            if expected.is_none() {
                // In the data.
                bytes[20] ^= 1;
            }
            fs::write(corpus.join(name), bytes).unwrap();
        }
        let opened = sealed::open(&fs::read(corpus.join(name)).unwrap(), &key(JUDGE));
        match expected {
            Some(expected) => assert_eq!(opened, expected, "{name}"),
            None => assert_eq!(opened, Err(OpenError::Damaged), "{name}"),
        }
    }
}

/// Evidence of the first and only answer.
fn evidence_of_one_answer() -> Evidence {
    let mut host = Host::new(ACCUSED);
    host.step(&rows(0, 1), 1, true);
    Evidence::new(ROW as u32, rows(0, 1), host.proof(0), None).unwrap()
}

/// Evidence whose host signs that it returned more rows than it received.
fn evidence_of_many_rows() -> Evidence {
    let mut host = Host::new(ACCUSED);
    host.step(&rows(0, 1), 1, false);
    let claim = &mut host.signed.claims[0];
    claim.rows = 2;
    host.signed.statement.chain = claim.after([0; 32]);
    Evidence::new(ROW as u32, rows(0, 1), host.proof(0), None).unwrap()
}

proptest! {
    #[test]
    fn garbage_and_truncated_evidence_is_refused(
        bytes in proptest::collection::vec(any::<u8>(), 0..200),
        at in any::<prop::sample::Index>(),
    ) {
        prop_assert_eq!(Evidence::decode(&bytes), Err(EvidenceFault::Malformed));
        let whole = evidence(true, Some(false)).encode();
        let cut = &whole[..at.index(whole.len())];
        prop_assert_eq!(Evidence::decode(cut), Err(EvidenceFault::Malformed));
        // Sealed correctly, it is a false accusation all the same.
        let sealed = sealed::seal(&bytes, [id(JUDGE)]).unwrap().unwrap();
        let dispute = announced(&evidence(true, None));
        prop_assert_eq!(judge(&sealed, ACCUSER, &dispute, JUDGE), Ok(Finding::None));
    }

    /// No change of a valid evidence convicts an honest host.
    #[test]
    fn an_honest_host_is_never_found_guilty(
        at in any::<prop::sample::Index>(),
        bit in 0u8..8,
    ) {
        let honest = evidence(false, Some(false));
        let mut bytes = honest.encode();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        if let Ok(changed) = Evidence::decode(&bytes) {
            for dispute in [announced(&honest), announced(&changed)] {
                prop_assert!(fault(&changed, &dispute).is_err());
            }
        }
    }
}
