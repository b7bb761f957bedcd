"""What the task files beside this one name: lm-eval looks for functions in a task file's own folder."""

from triadic.evaluation.recall_tasks import recall_documents, recall_score

__all__ = ["recall_documents", "recall_score"]
