//! Instruction sets.

/// Instruction set of the kernels. A processor of another family has other variants. Its name is the
/// variant's in lower case. Ordered from the reference to the best.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    strum::Display,
    strum::EnumIter,
    strum::IntoStaticStr,
)]
#[strum(serialize_all = "lowercase")]
pub enum Isa {
    /// Plain Rust; the reference for the others.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// `Avx2` with AVX-VNNI: Intel's consumer CPUs since 2021, which lack AVX-512.
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    /// x86-64 with AVX-512 F, BW, DQ, VL and VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// Best instruction set of this CPU.
    pub fn detect() -> Self {
        let available = Self::available();
        available.into_iter().max().unwrap_or(Self::Portable)
    }

    /// Instruction sets of this CPU, [`Isa::Portable`] first and the best last.
    pub fn available() -> Vec<Self> {
        use strum::IntoEnumIterator as _;
        Self::iter().filter(|isa| isa.usable()).collect()
    }

    /// Lower-case name, as [`FromStr`](std::str::FromStr) reads it.
    pub fn name(self) -> &'static str {
        self.into()
    }

    pub(super) fn usable(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => Self::Avx2.usable() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.usable()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
        }
    }
}

impl std::str::FromStr for Isa {
    type Err = String;

    /// Accepts only instruction sets that this CPU has.
    fn from_str(name: &str) -> Result<Self, String> {
        let available = Self::available();
        let found = available.iter().find(|isa| isa.name() == name);
        found.copied().ok_or_else(|| {
            let names: Vec<&str> = available.iter().map(|isa| isa.name()).collect();
            format!("{name:?} is not one of {}", names.join(", "))
        })
    }
}
