"""This project as a peer: DFlash or plain decoding. Compilation is warm-up: nothing cached on disk is used."""

from worker import Answer, Job

from torch_dflash import generate, load_pair


def load(job: Job) -> Answer:
    pair = load_pair(job.target, job.draft if job.method == "dflash" else None, job.dtype)

    def answer(prompt_ids: list[int]) -> tuple[list[int], int]:
        (result,) = generate(pair, [prompt_ids], job.max_new_tokens, job.stop_ids, method=job.method)
        return result.token_ids, result.stats.steps

    return answer
