//! Schedules of faults, for the scenes that use them.

use std::fmt::{self, Debug};
use std::marker::PhantomData;
use std::str::FromStr;
use std::time::Duration;

use strum::VariantArray;

use crate::random::Random;

/// A scene: its nodes, and what can happen to them.
pub trait Scene: Sized {
    /// Kind of a fault. Its name is what a command takes.
    type Kind: VariantArray + Copy + Debug + PartialEq;

    /// Option of the command that chooses the scene, if it is not the first one.
    const OPTION: &'static str;
    /// Number of nodes that faults happen to.
    const NODES: usize;
}

/// A fault of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault<K> {
    pub kind: K,
    pub node: usize,
    pub at: Duration,
    pub lasts: Duration,
}

/// Faults of a run, and the seed of all else that is random in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule<S: Scene> {
    pub seed: u64,
    pub faults: Vec<Fault<S::Kind>>,
    scene: PhantomData<S>,
}

/// Milliseconds in which faults begin.
const FAULTY: (u64, u64) = (300, 4_000);

impl<S: Scene> Schedule<S> {
    pub fn new(seed: u64, faults: Vec<Fault<S::Kind>>) -> Self {
        Self {
            seed,
            faults,
            scene: PhantomData,
        }
    }

    /// Draws one to five faults from the seed.
    pub fn of_seed(seed: u64) -> Self {
        let mut random = Random::new(seed, 1_000_003);
        let count = random.between(1, 5);
        let faults = (0..count).filter_map(|_| Self::draw(&mut random));
        Self::new(seed, faults.collect())
    }

    fn draw(random: &mut Random) -> Option<Fault<S::Kind>> {
        let kind = random.below(S::Kind::VARIANTS.len() as u64) as usize;
        Some(Fault {
            kind: *S::Kind::VARIANTS.get(kind)?,
            node: random.below(S::NODES as u64) as usize,
            at: Duration::from_millis(random.between(FAULTY.0, FAULTY.1)),
            // Most faults are short. Some outlast every timeout of a session.
            lasts: Duration::from_millis(match random.below(8) {
                0 => random.between(20_000, 70_000),
                1..=3 => random.between(3_000, 9_000),
                _ => random.between(50, 2_500),
            }),
        })
    }

    /// Every ordered combination of one to three faults on three nodes, 150 ms between them.
    pub fn triples() -> impl Iterator<Item = Self> {
        let kinds = S::Kind::VARIANTS.len() as u64;
        let all = kinds * 3;
        let numbers = (1..=3u32).flat_map(move |length| {
            let of_length = 0..all.pow(length);
            of_length.map(move |number| (length, number))
        });
        (0..).zip(numbers).map(move |(seed, (length, number))| {
            let faults = (0..length).filter_map(|place| {
                let one = number / all.pow(place) % all;
                Some(Fault {
                    kind: *S::Kind::VARIANTS.get((one % kinds) as usize)?,
                    node: (one / kinds) as usize,
                    at: Duration::from_millis(500 + 150 * u64::from(place)),
                    lasts: Duration::from_millis(2_500),
                })
            });
            Self::new(seed, faults.collect())
        })
    }

    /// When the last fault is over.
    pub fn end(&self) -> Duration {
        let ends = self.faults.iter().map(|fault| fault.at + fault.lasts);
        ends.max().unwrap_or_default()
    }

    /// Command that repeats the run.
    pub fn command(&self) -> String {
        let faults = match self.faults == Self::of_seed(self.seed).faults {
            true => String::new(),
            false => format!(" --faults {self}"),
        };
        let (seed, option) = (self.seed, S::OPTION);
        format!("cargo run --locked -p hearthnet-sim --{option} --seed {seed}{faults}")
    }

    /// Reads faults as a command writes them.
    ///
    /// # Errors
    /// A sentence about the fault that is none.
    pub fn read(seed: u64, faults: &str) -> Result<Self, String> {
        let faults: Result<Vec<_>, _> = faults.split(',').map(read_fault::<S>).collect();
        Ok(Self::new(seed, faults?))
    }
}

/// As a command takes it: `KIND@NODE:MS+MS`, separated by commas.
impl<S: Scene> fmt::Display for Schedule<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, fault) in self.faults.iter().enumerate() {
            let Fault {
                kind,
                node,
                at,
                lasts,
            } = fault;
            let comma = if index == 0 { "" } else { "," };
            let (at, lasts) = (at.as_millis(), lasts.as_millis());
            write!(f, "{comma}{kind:?}@{node}:{at}+{lasts}")?;
        }
        Ok(())
    }
}

fn read_fault<S: Scene>(text: &str) -> Result<Fault<S::Kind>, String> {
    let wrong = || format!("{text:?} is not KIND@NODE:MS+MS, such as Crash@0:700+2000");
    let (kind, rest) = text.split_once('@').ok_or_else(wrong)?;
    let (node, times) = rest.split_once(':').ok_or_else(wrong)?;
    let (at, lasts) = times.split_once('+').ok_or_else(wrong)?;
    let ms = |text: &str| u64::from_str(text).map(Duration::from_millis);
    let mut kinds = S::Kind::VARIANTS.iter();
    let kind = kinds.find(|one| format!("{one:?}") == kind);
    let node = node.parse().ok().filter(|node| *node < S::NODES);
    Ok(Fault {
        kind: *kind.ok_or_else(wrong)?,
        node: node.ok_or_else(wrong)?,
        at: ms(at).map_err(|_| wrong())?,
        lasts: ms(lasts).map_err(|_| wrong())?,
    })
}
