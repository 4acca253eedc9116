//! A SPIR-V module as a list of instructions.

use spirv::Op;

/// Instruction: its operation, and its operands as words, the ids of its type and result among them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Instruction {
    pub(super) op: u32,
    pub(super) operands: Vec<u32>,
}

impl Instruction {
    pub(super) fn new(op: Op, operands: impl Into<Vec<u32>>) -> Self {
        Self {
            op: op as u32,
            operands: operands.into(),
        }
    }

    pub(super) fn is(&self, op: Op) -> bool {
        self.op == op as u32
    }

    /// Whether its operation is one of `ops`.
    pub(super) fn among(&self, ops: &[Op]) -> bool {
        ops.iter().any(|op| self.is(*op))
    }
}

/// A literal string: UTF-8 in little-endian words, with at least one zero byte.
pub(super) fn string(text: &str) -> Vec<u32> {
    let mut bytes = text.as_bytes().to_vec();
    bytes.resize(text.len() / 4 * 4 + 4, 0);
    let words = bytes.as_chunks::<4>().0.iter();
    words.map(|word| u32::from_le_bytes(*word)).collect()
}

/// Operations of types and constants, of which a module needs each only once.
const DECLARED: [Op; 5] = [
    Op::TypeInt,
    Op::TypeVector,
    Op::TypePointer,
    Op::TypeCooperativeMatrixKHR,
    Op::Constant,
];

pub(super) struct Module {
    header: Vec<u32>,
    pub(super) code: Vec<Instruction>,
}

impl Module {
    /// Words of the header; the fourth is the bound of all ids.
    const HEADER: usize = 5;

    /// `None` if an instruction is longer than the module.
    pub(super) fn parse(words: &[u32]) -> Option<Self> {
        let (header, mut rest) = words.split_at_checked(Self::HEADER)?;
        let mut code = Vec::new();
        while let Some(first) = rest.first() {
            let (one, after) = rest.split_at_checked((first >> 16).max(1) as usize)?;
            code.push(Instruction {
                op: first & 0xffff,
                operands: one[1..].to_vec(),
            });
            rest = after;
        }
        let header = header.to_vec();
        Some(Self { header, code })
    }

    pub(super) fn words(&self) -> Vec<u32> {
        let mut words = self.header.clone();
        for one in &self.code {
            words.push((one.operands.len() as u32 + 1) << 16 | one.op);
            words.extend(&one.operands);
        }
        words
    }

    /// A new id.
    pub(super) fn id(&mut self) -> u32 {
        self.header[3] += 1;
        self.header[3] - 1
    }

    /// Inserts an instruction before the first one that is none of `ops`, which begin the module.
    pub(super) fn insert_after(&mut self, ops: &[Op], one: Instruction) {
        let at = self.code.iter().position(|one| !one.among(ops));
        self.code.insert(at.unwrap_or(self.code.len()), one);
    }

    /// Inserts an instruction before the first one of `ops`.
    pub(super) fn insert_before(&mut self, ops: &[Op], one: Instruction) {
        let at = self.code.iter().position(|one| one.among(ops));
        self.code.insert(at.unwrap_or(self.code.len()), one);
    }

    pub(super) fn capability(&mut self, capability: spirv::Capability) {
        let one = Instruction::new(Op::Capability, [capability as u32]);
        if !self.code.contains(&one) {
            self.insert_after(&[Op::Capability], one);
        }
    }

    pub(super) fn extension(&mut self, name: &str) {
        let one = Instruction::new(Op::Extension, string(name));
        self.insert_after(&[Op::Capability, Op::Extension], one);
    }

    /// Id of a type or constant. `operands` omits its result; a constant's type is the first of them.
    pub(super) fn declare(&mut self, op: Op, operands: &[u32]) -> u32 {
        debug_assert!(DECLARED.contains(&op));
        let result = usize::from(op == Op::Constant);
        let same = |one: &&Instruction| {
            let (before, rest) = one.operands.split_at(result.min(one.operands.len()));
            one.is(op) && before == &operands[..result] && rest.get(1..) == operands.get(result..)
        };
        if let Some(known) = self.code.iter().find(same) {
            return known.operands[result];
        }
        let id = self.id();
        let mut all = operands.to_vec();
        all.insert(result, id);
        self.insert_before(&[Op::Function], Instruction::new(op, all));
        id
    }

    /// Id of a u32.
    pub(super) fn constant(&mut self, value: u32) -> u32 {
        let word = self.declare(Op::TypeInt, &[32, 0]);
        self.declare(Op::Constant, &[word, value])
    }

    /// Value of a constant of one word.
    pub(super) fn value(&self, id: u32) -> Option<u32> {
        let mut constants = self.code.iter().filter(|one| one.is(Op::Constant));
        let known = constants.find(|one| one.operands[1] == id);
        known.map(|one| one.operands[2])
    }

    /// Id with a name. The module must have been written with names.
    pub(super) fn named(&self, name: &str) -> Option<u32> {
        let name = string(name);
        let mut names = self.code.iter().filter(|one| one.is(Op::Name));
        let known = names.find(|one| one.operands[1..] == name);
        known.map(|one| one.operands[0])
    }
}
