//! Kernels and their WGSL texts.
//!
//! A text is put together of the arithmetic (`wgsl/float.wgsl` and what its functions are called by),
//! of constants, and of the kernel. So each pipeline has the code of its own case only.

use std::fmt::{self, Write as _};

use hearthnet_files::blocks::{Code, Layout, SubScale, WeightType};
use hearthnet_files::spec::Activation;

use crate::panels::sign_bits;

/// All kernels, each once.
pub fn all() -> Vec<Kernel> {
    use strum::IntoEnumIterator as _;
    let mut all = vec![
        Kernel::Probe,
        Kernel::RmsNorm,
        Kernel::L2Norm,
        Kernel::LayerNorm,
        Kernel::Quantise,
        Kernel::Rope { interleaved: true },
        Kernel::Rope { interleaved: false },
        Kernel::StoreKv,
        Kernel::Score,
        Kernel::Softmax,
        Kernel::Mix,
        Kernel::Overflow,
        Kernel::Convolve,
        Kernel::Keep,
        Kernel::DeltaRule,
        Kernel::MambaScan,
    ];
    let formulas = [
        Formula::AddRound,
        Formula::Round,
        Formula::Scale,
        Formula::Multiply,
        Formula::AddScaled,
        Formula::Softcap,
        Formula::Copy,
    ];
    let formulas = formulas
        .into_iter()
        .chain(Unary::iter().map(Formula::Unary))
        .chain(Activation::iter().map(Formula::Gate));
    all.extend(formulas.map(Kernel::Elementwise));
    for weight_type in WeightType::ALL {
        for (rows, paired) in [(1, false), (4, false), (1, true)] {
            all.push(Kernel::Matrix {
                weight_type,
                rows,
                paired,
                careful: false,
            });
        }
    }
    all.push(Kernel::Matrix {
        weight_type: WeightType::MXFP4,
        rows: 1,
        paired: false,
        careful: true,
    });
    let quantised = WeightType::ALL.into_iter().filter(|ty| ty.quantised());
    all.extend(quantised.map(|weight_type| Kernel::Tiles {
        weight_type,
        tile: Tile {
            m: 16,
            n: 16,
            k: 16,
        },
        units: false,
    }));
    all
}

/// How a card computes floats. Ordered from the one that relies on the card least.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, strum::Display)]
#[strum(serialize_all = "snake_case")]
pub enum Arithmetic {
    /// On the bits, by operations on integers.
    Integers,
    /// The card's fused multiply-add, and integers where a number may be subnormal.
    Guarded,
    /// As `Guarded`, but without the guard in the products of matrices, where the scales show that
    /// no number is subnormal.
    Native,
}

impl Arithmetic {
    /// All of them, the fastest first.
    pub const FASTEST_FIRST: [Self; 3] = [Self::Native, Self::Guarded, Self::Integers];
}

/// Form in which a driver gets a kernel. Ordered from the one that says least about its arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Route {
    /// WGSL, which wgpu compiles.
    Wgsl,
    /// SPIR-V that forbids contractions and, if the driver has it, asks for an `fma` with one rounding.
    /// Vulkan only.
    Spirv,
}

/// Arithmetic of a kernel and the route of its compilation. Ordered as arithmetics are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Way {
    pub arithmetic: Arithmetic,
    pub route: Route,
}

impl Way {
    /// All of them, in the order in which they are tried.
    pub fn all() -> impl Iterator<Item = Self> {
        let routes =
            |arithmetic| [Route::Spirv, Route::Wgsl].map(|route| Self { arithmetic, route });
        Arithmetic::FASTEST_FIRST.into_iter().flat_map(routes)
    }
}

impl From<Arithmetic> for Way {
    /// Allows both routes.
    fn from(arithmetic: Arithmetic) -> Self {
        Self {
            arithmetic,
            route: Route::Spirv,
        }
    }
}

/// Threads of a workgroup of [`Kernel::Tiles`].
pub(crate) const THREADS_OF_TILES: u32 = 128;

/// Shape of the tiles of matrix units: the products of `m` outputs with `n` rows, from `k` inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    pub m: u32,
    pub n: u32,
    pub k: u32,
}

impl Tile {
    /// Whether the kernel can use such tiles: each number is 8, 16 or 32.
    pub fn fits(self) -> bool {
        [self.m, self.n, self.k]
            .iter()
            .all(|n| [8, 16, 32].contains(n))
    }

    /// vec4 that a run of `k` signed bytes takes in the memory of a workgroup.
    pub(crate) fn run(self) -> u32 {
        self.k.div_ceil(16)
    }

    /// Runs of an integer of [`Kernel::Tiles`], which is of 32 inputs, or of 16 in types with a
    /// sub-scale for 16.
    pub(crate) fn steps(self, weight_type: WeightType) -> u32 {
        let inputs = if of_halves(weight_type) { 16 } else { 32 };
        (inputs / self.k).max(1)
    }

    /// Bytes of a workgroup's memory that [`Kernel::Tiles`] takes, at most.
    pub fn workgroup_bytes(self) -> u32 {
        let operands = 4 * 32 * self.run() * (32 / self.k);
        16 * (operands + 512 + 2 * 64)
    }
}

/// Whether a type has a sub-scale for each 16 inputs.
fn of_halves(weight_type: WeightType) -> bool {
    let sub_scale = Layout::of(weight_type).sub_scale;
    matches!(sub_scale, SubScale::Scale16 | SubScale::ScaleMin16)
}

/// Function of one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::Display, strum::EnumIter)]
#[strum(serialize_all = "snake_case")]
pub enum Unary {
    Exp,
    Silu,
    Sigmoid,
    Gelu,
    GeluErf,
    SquaredRelu,
}

/// Formula of `elementwise.wgsl`: of x, y, the value before (old) and an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::Display)]
#[strum(serialize_all = "snake_case")]
pub enum Formula {
    Unary(Unary),
    /// With a gate.
    Gate(Activation),
    AddRound,
    Round,
    Scale,
    Multiply,
    AddScaled,
    Softcap,
    Copy,
}

/// A kernel: one pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Kernel {
    /// Float operations by themselves; for the self-test only.
    Probe,
    Elementwise(Formula),
    RmsNorm,
    L2Norm,
    LayerNorm,
    Quantise,
    Rope {
        interleaved: bool,
    },
    StoreKv,
    Score,
    Softmax,
    Mix,
    Overflow,
    /// Causal convolution of channels, and the step that stores its last inputs.
    Convolve,
    Keep,
    DeltaRule,
    MambaScan,
    /// Products of a matrix with `rows` rows at a time.
    Matrix {
        weight_type: WeightType,
        rows: u32,
        /// Rows and panels come from a list, for experts.
        paired: bool,
        /// Guards all chains.
        careful: bool,
    },
    /// Products of a quantised matrix with 32 rows at a time.
    Tiles {
        weight_type: WeightType,
        tile: Tile,
        /// The driver's matrix units make the tiles, which only [`Route::Spirv`] can say. Otherwise
        /// threads do.
        units: bool,
    },
}

/// Whether a kernel writes a buffer, or may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    Read,
    Write,
}

impl Kernel {
    /// Name of the function in the text.
    pub fn entry(self) -> &'static str {
        match self {
            Self::RmsNorm | Self::L2Norm | Self::LayerNorm => self.into(),
            Self::Score | Self::Softmax | Self::Mix => self.into(),
            Self::Convolve | Self::Keep | Self::DeltaRule | Self::MambaScan => self.into(),
            // The only function of its text.
            _ => "main",
        }
    }

    /// Buffers, from binding 1 on.
    pub fn bindings(self) -> &'static [Access] {
        use Access::{Read as R, Write as W};
        match self {
            Self::Probe => &[R, R, R, W],
            Self::Elementwise(_) => &[W, W, W],
            Self::RmsNorm | Self::L2Norm | Self::LayerNorm => &[W, W, R, R],
            Self::Quantise | Self::Overflow => &[W, W],
            Self::Rope { .. } => &[W, R, R],
            Self::StoreKv => &[W, W, W, R, R],
            Self::Score | Self::Softmax | Self::Mix => &[W, R, R, R, W, R],
            Self::Convolve | Self::Keep | Self::DeltaRule | Self::MambaScan => &[W, R, R, W, W],
            Self::Matrix { .. } | Self::Tiles { .. } => &[R, W, W, R, R],
        }
    }
}

/// Name in messages and in the table of digests. Variants with the same results have the same.
impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Probe => f.write_str("float operations"),
            Self::Elementwise(Formula::Unary(function)) => write!(f, "{function}"),
            Self::Elementwise(Formula::Gate(gate)) => write!(f, "gate {gate}"),
            Self::Elementwise(formula) => write!(f, "{formula}"),
            Self::RmsNorm | Self::L2Norm | Self::LayerNorm => f.write_str(self.into()),
            Self::Quantise | Self::DeltaRule | Self::MambaScan => f.write_str(self.into()),
            Self::Rope { interleaved: true } => f.write_str("rope interleaved"),
            Self::Rope { interleaved: false } => f.write_str("rope halves"),
            Self::StoreKv | Self::Score | Self::Softmax | Self::Mix => f.write_str("attention"),
            Self::Overflow => f.write_str("find_overflow"),
            Self::Convolve | Self::Keep => f.write_str("convolution"),
            // Its self-test has small scales, which no other type has.
            Self::Matrix {
                weight_type: WeightType::MXFP4,
                careful: true,
                ..
            } => f.write_str("matrix MXFP4 careful"),
            Self::Matrix { weight_type, .. } | Self::Tiles { weight_type, .. } => {
                write!(f, "matrix {weight_type:?}")
            }
        }
    }
}

const FLOAT: &str = include_str!("wgsl/float.wgsl");
const CARD: &str = include_str!("wgsl/card.wgsl");
const MATH: &str = include_str!("wgsl/math.wgsl");

/// Text of a kernel.
pub fn text(kernel: Kernel, arithmetic: Arithmetic) -> String {
    let mut text = FLOAT.to_owned();
    match arithmetic {
        Arithmetic::Integers => text += include_str!("wgsl/integers.wgsl"),
        Arithmetic::Guarded => {
            text += CARD;
            text += include_str!("wgsl/guarded.wgsl");
            text += include_str!("wgsl/guarded_terms.wgsl");
        }
        Arithmetic::Native => {
            text += CARD;
            text += include_str!("wgsl/guarded.wgsl");
            text += include_str!("wgsl/native_terms.wgsl");
        }
    }
    text += MATH;
    match kernel {
        Kernel::Probe => text += include_str!("wgsl/probe.wgsl"),
        Kernel::Elementwise(formula) => {
            let value = value(formula);
            let signature = "fn value(x: u32, y: u32, old: u32) -> u32";
            text += &format!("{signature} {{ return {value}; }}\n");
            text += include_str!("wgsl/elementwise.wgsl");
        }
        Kernel::RmsNorm | Kernel::L2Norm | Kernel::LayerNorm => {
            text += include_str!("wgsl/norm.wgsl");
        }
        Kernel::Quantise => text += include_str!("wgsl/quantise.wgsl"),
        Kernel::Rope { interleaved } => {
            text += &format!("const INTERLEAVED: bool = {interleaved};\n");
            text += include_str!("wgsl/rope.wgsl");
        }
        Kernel::StoreKv => {
            text += include_str!("wgsl/pages.wgsl");
            text += include_str!("wgsl/store_kv.wgsl");
        }
        Kernel::Score | Kernel::Softmax | Kernel::Mix => {
            text += include_str!("wgsl/pages.wgsl");
            text += include_str!("wgsl/attention.wgsl");
        }
        Kernel::Overflow => text += include_str!("wgsl/overflow.wgsl"),
        Kernel::Convolve | Kernel::Keep | Kernel::DeltaRule | Kernel::MambaScan => {
            text += include_str!("wgsl/recurrence.wgsl");
        }
        Kernel::Matrix {
            weight_type,
            rows,
            paired,
            careful,
        } => {
            text += &format!("const ROWS: u32 = {rows}u;\nconst PAIRED: bool = {paired};\n");
            if weight_type.quantised() {
                text += &constants(weight_type);
                text += &format!("const CAREFUL: bool = {careful};\n");
                text += include_str!("wgsl/weights.wgsl");
                text += include_str!("wgsl/matrix.wgsl");
            } else {
                let kind = match weight_type {
                    WeightType::F32 => 0,
                    WeightType::F16 => 1,
                    _ => 2,
                };
                text += &format!("const KIND: u32 = {kind}u;\n");
                text += include_str!("wgsl/plain.wgsl");
            }
        }
        Kernel::Tiles {
            weight_type,
            tile,
            units,
        } => {
            text += &constants(weight_type);
            for (name, value) in [
                ("M", tile.m),
                ("N", tile.n),
                ("K", tile.k),
                ("RUN", tile.run()),
                ("STEPS", tile.steps(weight_type)),
                ("THREADS", THREADS_OF_TILES),
            ] {
                text += &format!("const {name}: u32 = {value}u;\n");
            }
            text += include_str!("wgsl/weights.wgsl");
            text += include_str!("wgsl/tiles.wgsl");
            text += match units {
                true => include_str!("wgsl/tiles_of_card.wgsl"),
                false => include_str!("wgsl/tiles_of_threads.wgsl"),
            };
        }
    }
    text
}

/// Expression of a formula.
fn value(formula: Formula) -> &'static str {
    match formula {
        Formula::Unary(Unary::Exp) => "f_exp(x)",
        Formula::Unary(Unary::Silu) => "f_silu(x)",
        Formula::Unary(Unary::Sigmoid) => "f_sigmoid(x)",
        Formula::Unary(Unary::Gelu) => "f_gelu(x)",
        Formula::Unary(Unary::GeluErf) => "f_gelu_erf(x)",
        Formula::Unary(Unary::SquaredRelu) => "f_relu2(x)",
        Formula::Gate(Activation::Silu) => "soft_mul(f_silu(x), y)",
        Formula::Gate(Activation::Gelu) => "soft_mul(f_gelu(x), y)",
        Formula::Gate(Activation::GeluErf) => "soft_mul(f_gelu_erf(x), y)",
        Formula::Gate(Activation::SquaredRelu) => "soft_mul(f_relu2(x), y)",
        Formula::Gate(Activation::Clamped) => "f_clamped(x, y)",
        Formula::AddRound => "round_to(p.argument, f_add(x, y))",
        Formula::Round => "round_to(p.argument, x)",
        Formula::Scale => "soft_mul(x, p.argument)",
        Formula::Multiply => "soft_mul(x, y)",
        Formula::AddScaled => "f_fma(x, y, old)",
        Formula::Softcap => "f_softcap(x, p.argument)",
        Formula::Copy => "x",
    }
}

/// Constants of `matrix.wgsl` for a quantised type.
fn constants(weight_type: WeightType) -> String {
    let layout = Layout::of(weight_type);
    let sub = match layout.sub_scale {
        SubScale::None => 0,
        SubScale::Scale => 1,
        SubScale::ScaleMin => 2,
        SubScale::Scale16 => 3,
        SubScale::ScaleMin16 => 4,
    };
    let bits = layout.bits.bytes() / 4;
    // Quants of 8 bits are signed on the card.
    let (offset, table) = match layout.code {
        Code::Offset(128) => (0, None),
        Code::Offset(offset) => (offset, None),
        Code::Table(table) => (0, Some(table)),
    };
    let mut text = format!(
        "const BITS: u32 = {bits}u;
const FIELDS: u32 = {}u;
const BF16_FIELDS: bool = {};
const SHARED: bool = {};
const SUB: u32 = {sub}u;
const SUB_BYTES: u32 = {}u;
const OFFSET: i32 = {offset};
const SIGNED: bool = {};
const HAS_TABLE: bool = {};
const TABLE: array<u32, 4> = array<u32, 4>(",
        layout.fields,
        layout.bf16_fields,
        layout.blocks > 1,
        layout.sub_scale.bytes(),
        bits == 4 && sign_bits(&layout) != 0,
        table.is_some(),
    );
    for four in table.unwrap_or(&[0; 16]).as_chunks::<4>().0 {
        let word = u32::from_le_bytes(four.map(i8::cast_unsigned));
        // Writing to a string cannot fail.
        let _ = write!(text, "{word:#x}u, ");
    }
    text += ");\n";
    text += match table {
        Some(_) => include_str!("wgsl/table.wgsl"),
        None => include_str!("wgsl/without_table.wgsl"),
    };
    text
}
