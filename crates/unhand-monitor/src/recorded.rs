//! Samples that were written down: one JSON document after the other, given in their order.

use std::collections::VecDeque;

use crate::{Error, Result, Sample, Sampler};

/// A sampler without a driver.
#[derive(Clone, Debug)]
pub struct Recorded {
    left: VecDeque<Sample>,
    n_samples: usize,
}

impl Recorded {
    /// Reads JSON documents with or without white space between them, as `serde_json` writes a [`Sample`].
    ///
    /// # Errors
    /// A document that is no sample.
    pub fn parse(text: &str) -> Result<Recorded> {
        let documents = serde_json::Deserializer::from_str(text).into_iter::<Sample>().enumerate();
        let left: VecDeque<Sample> = documents
            .map(|(index, sample)| sample.map_err(|source| Error::NotASample { number: index + 1, source }))
            .collect::<Result<_>>()?;
        Ok(Recorded { n_samples: left.len(), left })
    }
}

impl Sampler for Recorded {
    fn sample(&mut self) -> Result<Sample> {
        self.left.pop_front().ok_or(Error::Ended { n_samples: self.n_samples })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, Memory, Process, ProcessKind};

    #[test]
    fn gives_what_was_written_and_then_says_that_it_has_ended() {
        let sample = |used_bytes| Sample {
            driver_version: Some("580.95.05".to_owned()),
            cuda_driver_version: Some("13.0".to_owned()),
            devices: vec![Device {
                index: 0,
                uuid: "GPU-6d3d2b6c".to_owned(),
                name: None,
                memory: Memory {
                    total_bytes: Some(100),
                    used_bytes,
                    free_bytes: Some(60),
                    reserved_bytes: None,
                },
                mig: None,
                processes: Some(vec![Process { pid: 7, used_bytes: None, kind: ProcessKind::Compute }]),
            }],
            unreadable: Vec::new(),
            has_foreign_pids: Some(true),
        };
        let samples = [sample(Some(40)), sample(None)];
        let text: String =
            samples.iter().map(|sample| serde_json::to_string(sample).expect("JSON") + "\n").collect();
        let mut recorded = Recorded::parse(&text).expect("samples");
        for sample in samples {
            assert_eq!(recorded.sample().expect("there is one"), sample);
        }
        assert_eq!(recorded.sample().expect_err("no more").to_string(), "the recording has ended: 2 samples");
    }

    #[test]
    fn what_is_not_there_is_not_known() {
        let text = r#"{"devices":[{"index":0,"uuid":"GPU-0"}]}"#;
        let sample = Recorded::parse(text).expect("a sample").sample().expect("one");
        assert_eq!(sample.devices[0].memory, Memory::default());
        assert_eq!((sample.driver_version, &sample.devices[0].processes), (None, &None));
    }

    #[test]
    fn names_the_document_that_is_no_sample() {
        let error = Recorded::parse(r#"{"devices":[]} {"devices":0}"#).expect_err("the second is none");
        assert_eq!(error.to_string(), "not a recorded sample: number 2");
    }
}
