//! Whether the adopted models fit together into the memory that the homes give. Pure.

use std::fmt;

use crate::cli::bytes;

/// Memory that adopted models need for their weights, and that the homes give for weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fit {
    /// Largest model.
    name: String,
    models: u64,
    pub(crate) needed: u64,
    pub(crate) given: u64,
}

impl Fit {
    /// For models with these names and sizes in bytes. The models share the memory of each home
    /// equally, so all get as much as the largest needs. `None` without models.
    pub(crate) fn of<'a>(
        models: impl IntoIterator<Item = (&'a str, u64)>,
        given: u64,
    ) -> Option<Self> {
        let models: Vec<(&str, u64)> = models.into_iter().collect();
        let (name, largest) = models.iter().max_by_key(|(_, bytes)| *bytes)?;
        let count = models.len() as u64;
        Some(Self {
            name: (*name).to_owned(),
            models: count,
            needed: largest.saturating_mul(count),
            given,
        })
    }

    pub(crate) fn fits(&self) -> bool {
        self.needed <= self.given
    }
}

/// Warning if the models do not fit, with the missing memory and a remedy.
impl fmt::Display for Fit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, models) = (&self.name, self.models);
        let (needed, given) = (bytes(self.needed), bytes(self.given));
        let more = bytes(self.needed.saturating_sub(self.given));
        match models {
            1 => write!(
                f,
                "{name} does not fit into the memory of the homes: it needs about {needed}, and they give \
                 {given} to weights"
            )?,
            _ => write!(
                f,
                "the {models} adopted models do not fit together: they share the memory of the homes \
                 equally, so that with {name} all need about {needed}, and the homes give {given} to weights"
            )?,
        }
        write!(
            f,
            ". Layers will be missing until {more} more are given: by `hearthnet up` in another home, or by \
             a larger manners.memory_percent"
        )?;
        if models > 1 {
            f.write_str(". `hearthnet model drop` of a model leaves its share to the others")?;
        }
        write!(f, ". `hearthnet plan {name}` says more")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn models_that_share_memory_all_need_as_much_as_the_largest() {
        let models = [("small", GIB), ("large", 9 * GIB)];
        assert!(Fit::of(models, 18 * GIB).unwrap().fits());
        let fit = Fit::of(models, 12 * GIB).unwrap();
        assert!(!fit.fits());
        let said = fit.to_string();
        for part in [
            "the 2 adopted models do not fit together",
            "with large all need about 18.0 GiB, and the homes give 12.0 GiB",
            "6.0 GiB more",
            "`hearthnet up` in another home",
            "`hearthnet model drop`",
            "`hearthnet plan large`",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
    }

    #[test]
    fn a_model_alone_needs_its_own_size() {
        assert_eq!(Fit::of([], GIB), None);
        assert!(Fit::of([("one", GIB)], GIB).unwrap().fits());
        let said = Fit::of([("one", 3 * GIB)], GIB).unwrap().to_string();
        assert!(said.starts_with("one does not fit"), "{said}");
        assert!(
            said.contains("2.0 GiB more") && !said.contains("drop"),
            "{said}"
        );
    }
}
